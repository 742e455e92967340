//go:build k8s1.16 && !k8s1.32

package main

import "k8s.io/kubernetes/pkg/kubelet/util"

var createListener = util.CreateListener
