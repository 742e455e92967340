//go:build k8s1.37

package main

import "k8s.io/klog/v2"

func (k *kubelet) capacity() (capacity, allocatable counts) {
	all, healthy, _ := k.impl.GetCapacity(klog.Background())
	return quantities(all), quantities(healthy)
}
