//go:build k8s1.9 && !k8s1.25

package main

func (k *kubelet) start([]running) error { return k.impl.Start(k.node.active, k.node) }
