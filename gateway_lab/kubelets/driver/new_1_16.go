//go:build k8s1.16 && !k8s1.19

package main

import (
	_ "unsafe"

	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/topology"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpuset"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(string, topology.NUMANodeInfo, topologymanager.Store) (*managerImpl, error)

func newImpl(n *node) (*managerImpl, error) {
	numa := topology.NUMANodeInfo{}
	for _, id := range n.numa {
		numa[id] = cpuset.NewCPUSet(id)
	}
	return newManagerImpl(n.socket(), numa, topologymanager.NewFakeManager())
}
