//go:build k8s1.37

package main

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

func (k *kubelet) admit(pod *v1.Pod, container *v1.Container) error {
	if k.node.admits != nil {
		return k.node.admits(pod)
	}
	return k.impl.Allocate(context.Background(), pod, container, lifecycle.AddOperation)
}
