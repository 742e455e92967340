//go:build k8s1.32

package main

import "k8s.io/cri-client/pkg/util"

var createListener = util.CreateListener
