//go:build k8s1.10

package main

import "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"

type (
	managerImpl = devicemanager.ManagerImpl
	told        = devicemanager.DeviceRunContainerOptions
)

func addAnnotations(o *options, t *told) {
	for _, a := range t.Annotations {
		o.Annotations[a.Name] = a.Value
	}
}
