//go:build k8s1.16 && !k8s1.18

package main

import "k8s.io/kubernetes/pkg/scheduler/nodeinfo"

var newNodeInfo = nodeinfo.NewNodeInfo
