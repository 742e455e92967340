//go:build k8s1.28 && !k8s1.32

package main

import (
	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	limit "k8s.io/kubernetes/pkg/kubelet/apis/podresources/grpc"
)

func newLister(k *kubelet) *grpc.Server {
	server := grpc.NewServer(limit.WithRateLimiter(limit.DefaultQPS, limit.DefaultBurstTokens))
	v1alpha1.RegisterPodResourcesListerServer(server, podresources.NewV1alpha1PodResourcesServer(k.providers()))
	v1.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(k.providers()))
	return server
}
