//go:build k8s1.24 && !k8s1.28

package main

import (
	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
)

func newLister(k *kubelet) *grpc.Server {
	server, held := grpc.NewServer(), devices{k.impl}
	v1alpha1.RegisterPodResourcesListerServer(server, podresources.NewV1alpha1PodResourcesServer(k.node, held))
	v1.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(k.node, held, nothing{}, nothing{}))
	return server
}
