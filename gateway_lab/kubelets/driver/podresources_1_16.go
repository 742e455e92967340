//go:build k8s1.16

package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// servePodResources serves the kubelet's pod-resources API, as the kubelet does from before its device manager's start
// to the end of the process; end is for a driver that is started again. Folder and stale socket are the listener's care.
func servePodResources(m manager, socket string) (end func(), err error) {
	root := filepath.Dir(filepath.Dir(socket))
	about, err := os.Stat(root)
	if err != nil {
		return nil, err
	}
	if about.Mode()&os.ModeSticky != 0 {
		fmt.Fprintf(os.Stderr, "pod-resources is not served: %s belongs to everyone, so another kubelet's socket may be in it\n", root)
		return func() {}, nil
	}
	listener, err := createListener("unix://" + socket)
	if err != nil {
		return nil, err
	}
	server := newLister(m.(*kubelet))
	go func() { _ = server.Serve(listener) }() // until Stop
	return func() {
		server.Stop()
		_ = os.Remove(socket)
	}, nil
}
