//go:build k8s1.9

package main

import (
	"strings"

	model "github.com/prometheus/client_model/go"
)

// registrations picks the registrations by resource name out of what was gathered.
func registrations(families []*model.MetricFamily) counts {
	n := counts{}
	for _, family := range families {
		if !strings.HasPrefix(family.GetName(), "kubelet_device_plugin_registration_") {
			continue
		}
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if label.GetName() == "resource_name" {
					n[label.GetValue()] += int64(metric.GetCounter().GetValue())
				}
			}
		}
	}
	return n
}
