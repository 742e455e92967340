//go:build k8s1.13 && !k8s1.19

package main

import (
	"flag"

	"k8s.io/klog"
)

func logFlags() { klog.InitFlags(flag.CommandLine) }
