//go:build k8s1.24 && !k8s1.37

package main

import api "k8s.io/kubelet/pkg/apis/podresources/v1"

func (d devices) GetDevices(pod, container string) []*api.ContainerDevices {
	return listed(d.managerImpl.GetDevices(pod, container))
}

func (d devices) GetAllocatableDevices() []*api.ContainerDevices {
	return listed(d.managerImpl.GetAllocatableDevices())
}

// nothing is what the managers of CPUs and memory say whose policy is none.
type nothing struct{}

func (nothing) GetCPUs(string, string) []int64                  { return nil }
func (nothing) GetAllocatableCPUs() []int64                     { return nil }
func (nothing) GetMemory(string, string) []*api.ContainerMemory { return nil }
func (nothing) GetAllocatableMemory() []*api.ContainerMemory    { return nil }
