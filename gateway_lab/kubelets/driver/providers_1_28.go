//go:build k8s1.28

package main

import "k8s.io/kubernetes/pkg/kubelet/apis/podresources"

func (k *kubelet) providers() podresources.PodResourcesProviders {
	return podresources.PodResourcesProviders{
		Pods:             k.node,
		Devices:          devices{k.impl},
		Cpus:             nothing{},
		Memory:           nothing{},
		DynamicResources: nothing{},
	}
}
