//go:build k8s1.10 && !k8s1.35

package main

import v1 "k8s.io/api/core/v1"

func runOptions(m *managerImpl, pod *v1.Pod, container *v1.Container) (*told, error) {
	return m.GetDeviceRunContainerOptions(pod, container)
}
