//go:build k8s1.37

package main

import (
	_ "unsafe"

	cadvisor "github.com/google/cadvisor/lib/model"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(klog.Logger, string, []cadvisor.Node, topologymanager.Store) (*managerImpl, error)

func newImpl(n *node) (*managerImpl, error) {
	numa := []cadvisor.Node{}
	for _, id := range n.numa {
		numa = append(numa, cadvisor.Node{Id: id})
	}
	log := klog.Background()
	return newManagerImpl(log, n.socket(), numa, topologymanager.NewFakeManager(log))
}
