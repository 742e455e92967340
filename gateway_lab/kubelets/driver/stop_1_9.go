//go:build k8s1.9 && !k8s1.35

package main

func (k *kubelet) stop() error { return k.impl.Stop() }
