//go:build k8s1.34

package main

import (
	"reflect"

	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	drabeta "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthalpha "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

var apis = map[string][]reflect.Type{
	"dra/v1":                {reflect.TypeFor[dra.DRAPluginServer]()},
	"dra/v1beta1":           {reflect.TypeFor[drabeta.DRAPluginServer]()},
	"dra-health/v1":         {reflect.TypeFor[health.DRAResourceHealthServer]()},
	"dra-health/v1alpha1":   {reflect.TypeFor[healthalpha.DRAResourceHealthServer]()},
	"pluginregistration/v1": {reflect.TypeFor[registration.RegistrationServer]()},
}
