//go:build k8s1.16 && !k8s1.20

package main

import (
	"google.golang.org/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources/v1alpha1"
)

func newLister(k *kubelet) *grpc.Server {
	server := grpc.NewServer()
	v1alpha1.RegisterPodResourcesListerServer(server, podresources.NewPodResourcesServer(k.node, k.impl))
	return server
}
