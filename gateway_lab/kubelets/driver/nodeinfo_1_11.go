//go:build k8s1.11 && !k8s1.16

package main

import "k8s.io/kubernetes/pkg/scheduler/cache"

var newNodeInfo = cache.NewNodeInfo
