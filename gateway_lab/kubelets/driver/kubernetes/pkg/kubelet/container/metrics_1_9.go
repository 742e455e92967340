//go:build !k8s1.20

package container

import "time"

// RuntimeCache is what the kubelet's metrics count pods by, in a collector that the driver never registers.
type RuntimeCache interface {
	GetPods() ([]*Pod, error)
	ForceUpdateIfOlder(time.Time) error
}

type Pod struct{ Containers []struct{} }
