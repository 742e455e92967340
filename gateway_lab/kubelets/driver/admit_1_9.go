//go:build k8s1.9 && !k8s1.18

package main

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// admit: up to 1.17 all containers of a pod are admitted at once; those that have their devices already keep them.
func (k *kubelet) admit(pod *v1.Pod, _ *v1.Container) error {
	return k.impl.Allocate(newNodeInfo(), &lifecycle.PodAdmitAttributes{Pod: pod, OtherPods: k.node.active()})
}
