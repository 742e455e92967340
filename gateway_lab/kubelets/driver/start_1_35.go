//go:build k8s1.35

package main

import (
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
)

func (k *kubelet) start(list []running) error {
	ids, names := sets.New[string](), containermap.NewContainerMap()
	for _, c := range list {
		ids.Insert(c.ID)
		names.Add(c.Pod, c.Container, c.ID)
	}
	return k.impl.Start(klog.Background(), k.node.active, k.node, names, ids)
}
