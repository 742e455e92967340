//go:build k8s1.32 && !k8s1.36

package main

import (
	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
	limit "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
)

func newLister(k *kubelet) *grpc.Server {
	server := grpc.NewServer(limit.WithRateLimiter("podresources", podresources.DefaultQPS, podresources.DefaultBurstTokens))
	v1alpha1.RegisterPodResourcesListerServer(server, podresources.NewV1alpha1PodResourcesServer(k.providers()))
	v1.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(k.providers()))
	return server
}
