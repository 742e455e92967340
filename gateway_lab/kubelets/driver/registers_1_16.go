//go:build k8s1.16

package main

import (
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/kubernetes/pkg/kubelet/metrics"
)

// The kubelet's metric device_plugin_registration_count, called device_plugin_registration_total in newer versions, goes up
// by one at the start of each Register, before the kubelet looks at the version and the name: refused Registers are in it.
// A Register for a service that isn't there (deviceplugin.Registration) reaches no handler and isn't counted.

func countRegisters() error { return legacyregistry.Register(metrics.DevicePluginRegistrationCount) }

func registers() (counts, error) {
	families, err := legacyregistry.DefaultGatherer.Gather()
	return registrations(families), err
}
