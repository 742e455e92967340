//go:build k8s1.37

package main

import (
	"context"
	"fmt"
	_ "unsafe"

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(klog.Logger, string, []cadvisor.Node, topologymanager.Store) (*managerImpl, error)

func newImpl(n *node) (*managerImpl, error) {
	numa := []cadvisor.Node{}
	for _, id := range n.numa {
		numa = append(numa, cadvisor.Node{Id: id})
	}
	log := klog.Background()
	if n.topology == "" {
		return newManagerImpl(log, n.socket(), numa, topologymanager.NewFakeManager(log))
	}
	topology, err := topologymanager.NewManager(log, numa, n.topology, topologymanager.ContainerTopologyScope, nil)
	if err != nil {
		return nil, err
	}
	impl, err := newManagerImpl(log, n.socket(), numa, topology)
	if err != nil {
		return nil, err
	}
	topology.AddHintProvider(log, impl)
	n.admits = func(pod *v1.Pod) error {
		attributes := &lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation}
		if result := topology.Admit(context.Background(), attributes); !result.Admit {
			return fmt.Errorf("%s: %s", result.Reason, result.Message)
		}
		return nil
	}
	return impl, nil
}
