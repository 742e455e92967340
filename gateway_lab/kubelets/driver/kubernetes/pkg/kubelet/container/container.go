// Package container stands in for k8s.io/kubernetes/pkg/kubelet/container. It has what the device manager uses of it: what
// it tells the runtime.
package container

type EnvVar struct{ Name, Value string }

type Annotation struct{ Name, Value string }

type DeviceInfo struct{ PathOnHost, PathInContainer, Permissions string }

type CDIDevice struct{ Name string }

type Mount struct {
	Name           string
	ContainerPath  string
	HostPath       string
	ReadOnly       bool
	SELinuxRelabel bool
}
