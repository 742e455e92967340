//go:build k8s1.9 && !k8s1.10

package main

import (
	_ "unsafe"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/deviceplugin"
	"k8s.io/kubernetes/plugin/pkg/scheduler/schedulercache"
)

type (
	managerImpl = deviceplugin.ManagerImpl
	told        = deviceplugin.DeviceRunContainerOptions
)

var newNodeInfo = schedulercache.NewNodeInfo

//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/deviceplugin.newManagerImpl
func newManagerImpl(string) (*managerImpl, error)

func newImpl(n *node) (*managerImpl, error) { return newManagerImpl(n.socket()) }

func runOptions(m *managerImpl, pod *v1.Pod, container *v1.Container) (*told, error) {
	return m.GetDeviceRunContainerOptions(pod, container), nil
}

// capacity: 1.9 leaves unhealthy devices out of its one list.
func (k *kubelet) capacity() (capacity, allocatable counts) {
	list, _ := k.impl.GetCapacity()
	return quantities(list), quantities(list)
}

func addAnnotations(*options, *told) {}
