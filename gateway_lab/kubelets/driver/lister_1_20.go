//go:build k8s1.20 && !k8s1.24

package main

import (
	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
)

type nothing struct{}

func (nothing) GetCPUs(string, string) []int64 { return nil }

func newLister(k *kubelet) *grpc.Server {
	server := grpc.NewServer()
	v1alpha1.RegisterPodResourcesListerServer(server, podresources.NewV1alpha1PodResourcesServer(k.node, k.impl))
	v1.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(k.node, k.impl, nothing{}))
	return server
}
