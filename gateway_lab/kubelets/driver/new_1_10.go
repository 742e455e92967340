//go:build k8s1.10 && !k8s1.16

package main

import _ "unsafe"

//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(string) (*managerImpl, error)

func newImpl(n *node) (*managerImpl, error) { return newManagerImpl(n.socket()) }
