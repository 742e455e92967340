//go:build !k8s1.14

package main

import (
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	_ "k8s.io/kubernetes/pkg/features" // makes the kubelet's gates known
)

func setGates(gates string) error { return utilfeature.DefaultFeatureGate.Set(gates) }
