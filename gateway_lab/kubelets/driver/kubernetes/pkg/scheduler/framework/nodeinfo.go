// Package framework stands in for k8s.io/kubernetes/pkg/scheduler/framework. It has what the device manager uses of it, in
// UpdatePluginResources, which the driver never calls.
package framework

import v1 "k8s.io/api/core/v1"

type NodeInfo struct{ Allocatable *Resource }

type Resource struct{ ScalarResources map[v1.ResourceName]int64 }

func (r *Resource) Clone() *Resource {
	scalars := map[v1.ResourceName]int64{}
	for name, quantity := range r.ScalarResources {
		scalars[name] = quantity
	}
	return &Resource{ScalarResources: scalars}
}
