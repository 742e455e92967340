//go:build k8s1.37

package main

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func (d devices) GetDevices(pod, container string) []*api.ContainerDevices {
	return listed(d.managerImpl.GetDevices(pod, container))
}

func (d devices) GetAllocatableDevices(log klog.Logger) []*api.ContainerDevices {
	return listed(d.managerImpl.GetAllocatableDevices(log))
}

// nothing is what the managers of CPUs, memory and dynamic resources say whose policy is none.
type nothing struct{}

func (nothing) GetCPUs(*v1.Pod, *v1.Container) []int64                               { return nil }
func (nothing) GetPodCPUs(string) []int64                                            { return nil }
func (nothing) GetAllocatableCPUs() []int64                                          { return nil }
func (nothing) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*api.ContainerMemory { return nil }
func (nothing) GetPodMemory(klog.Logger, string) []*api.ContainerMemory              { return nil }
func (nothing) GetAllocatableMemory(klog.Logger) []*api.ContainerMemory              { return nil }
func (nothing) GetDynamicResources(klog.Logger, *v1.Pod, *v1.Container) []*api.DynamicResource {
	return nil
}
