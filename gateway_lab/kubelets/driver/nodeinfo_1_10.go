//go:build k8s1.10 && !k8s1.11

package main

import "k8s.io/kubernetes/pkg/scheduler/schedulercache"

var newNodeInfo = schedulercache.NewNodeInfo
