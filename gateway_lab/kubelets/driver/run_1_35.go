//go:build k8s1.35

package main

import (
	"context"

	v1 "k8s.io/api/core/v1"
)

func runOptions(m *managerImpl, pod *v1.Pod, container *v1.Container) (*told, error) {
	return m.GetDeviceRunContainerOptions(context.Background(), pod, container)
}
