//go:build k8s1.19 && !k8s1.35

package main

import (
	_ "unsafe"

	cadvisor "github.com/google/cadvisor/info/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(string, []cadvisor.Node, topologymanager.Store) (*managerImpl, error)

func newImpl(n *node) (*managerImpl, error) {
	numa := []cadvisor.Node{}
	for _, id := range n.numa {
		numa = append(numa, cadvisor.Node{Id: id})
	}
	return newManagerImpl(n.socket(), numa, topologymanager.NewFakeManager())
}
