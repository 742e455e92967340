//go:build k8s1.24

package main

import (
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

// devices is what the container manager is between the device manager and the pod-resources API.
type devices struct{ *managerImpl }

// listed is containerDevicesFromResourceDeviceInstances of the container manager, which isn't built here. So a device whose
// topology has no nodes is left out, and one with two nodes comes twice.
func listed(held devicemanager.ResourceDeviceInstances) []*api.ContainerDevices {
	var list []*api.ContainerDevices
	for resource, instances := range held {
		for id, instance := range instances {
			place := instance.GetTopology()
			if place == nil {
				list = append(list, &api.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
				continue
			}
			for _, node := range place.GetNodes() {
				list = append(list, &api.ContainerDevices{
					ResourceName: resource,
					DeviceIds:    []string{id},
					Topology:     &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: node.GetID()}}},
				})
			}
		}
	}
	return list
}
