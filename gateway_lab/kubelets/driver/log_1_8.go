//go:build !k8s1.13

package main

// logFlags: glog makes its flags known by itself.
func logFlags() {}
