//go:build k8s1.35

package main

import "k8s.io/klog/v2"

func (k *kubelet) stop() error { return k.impl.Stop(klog.Background()) }
