//go:build !k8s1.34

package main

import (
	"reflect"

	dra "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

var apis = map[string][]reflect.Type{
	"dra/v1beta1":           {reflect.TypeFor[dra.DRAPluginServer]()},
	"pluginregistration/v1": {reflect.TypeFor[registration.RegistrationServer]()},
}
