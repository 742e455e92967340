//go:build k8s1.10 && !k8s1.37

package main

func (k *kubelet) capacity() (capacity, allocatable counts) {
	all, healthy, _ := k.impl.GetCapacity()
	return quantities(all), quantities(healthy)
}
