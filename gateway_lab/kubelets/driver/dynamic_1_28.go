//go:build k8s1.28 && !k8s1.37

package main

import (
	v1 "k8s.io/api/core/v1"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func (nothing) GetDynamicResources(*v1.Pod, *v1.Container) []*api.DynamicResource { return nil }
