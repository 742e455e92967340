//go:build k8s1.18 && !k8s1.37

package main

import v1 "k8s.io/api/core/v1"

func (k *kubelet) admit(pod *v1.Pod, container *v1.Container) error {
	return k.impl.Allocate(pod, container)
}
