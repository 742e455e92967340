//go:build k8s1.10 && !k8s1.17

package main

import (
	"reflect"

	api "k8s.io/kubernetes/pkg/kubelet/apis/deviceplugin/v1beta1"
)

// services is the Go API package of this version: the server interfaces of both services.
var services = []reflect.Type{
	reflect.TypeOf((*api.RegistrationServer)(nil)).Elem(),
	reflect.TypeOf((*api.DevicePluginServer)(nil)).Elem(),
}
