//go:build !k8s1.16

package main

// servePodResources: up to 1.12 there is no pod-resources API, 1.13 and 1.14 have it behind a gate that is off.
func servePodResources(manager, string) (end func(), err error) { return func() {}, nil }
