//go:build k8s1.19

package main

import (
	"flag"

	"k8s.io/klog/v2"
)

func logFlags() { klog.InitFlags(flag.CommandLine) }
