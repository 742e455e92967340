//go:build k8s1.9 && !k8s1.16

package main

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/kubernetes/pkg/kubelet/metrics"
)

// The kubelet's metric device_plugin_registration_count goes up by one at the start of each Register, before the kubelet
// looks at the version and the name: refused Registers are in it.

func countRegisters() error { return prometheus.Register(metrics.DevicePluginRegistrationCount) }

func registers() (counts, error) {
	families, err := prometheus.DefaultGatherer.Gather()
	return registrations(families), err
}
