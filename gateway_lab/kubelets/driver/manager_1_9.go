//go:build k8s1.9

package main

import (
	"reflect"
	"sync"

	v1 "k8s.io/api/core/v1"
)

const admitsDevices = true

// kubelet is the device manager of 1.9 and later, with the node it is on.
type kubelet struct {
	node *node
	impl *managerImpl
}

func newManager(n *node) (manager, error) {
	impl, err := newImpl(n)
	return &kubelet{node: n, impl: impl}, err
}

func (k *kubelet) run(pod *v1.Pod, container *v1.Container) (options, error) {
	o := newOptions()
	told, err := runOptions(k.impl, pod, container)
	if err != nil || told == nil {
		return o, err
	}
	for _, e := range told.Envs {
		o.Envs[e.Name] = e.Value
	}
	for _, m := range told.Mounts {
		o.Mounts = append(o.Mounts, mount{m.ContainerPath, m.HostPath, m.ReadOnly})
	}
	for _, d := range told.Devices {
		o.Devices = append(o.Devices, device{d.PathInContainer, d.PathOnHost, d.Permissions})
	}
	addAnnotations(&o, told)
	addCDI(&o, told)
	return o, nil
}

// books reads podDevices: pod -> container -> resource -> device IDs with the answer to Allocate. It has a lock of its own
// since 1.20, and was a bare map under the manager's lock before.
func (k *kubelet) books() books {
	b := books{}
	held := field(k.impl, "podDevices")
	if held.Kind() == reflect.Map {
		lock := field(k.impl, "mutex").Addr().Interface().(*sync.Mutex)
		lock.Lock()
		defer lock.Unlock()
	} else {
		inside := held.Interface()
		lock := field(inside, "RWMutex").Addr().Interface().(*sync.RWMutex)
		lock.RLock()
		defer lock.RUnlock()
		held = field(inside, "devs")
	}
	for pods := held.MapRange(); pods.Next(); {
		for containers := pods.Value().MapRange(); containers.Next(); {
			for resources := containers.Value().MapRange(); resources.Next(); {
				list := ids(resources.Value().FieldByName("deviceIds"))
				b.add(pods.Key().String(), containers.Key().String(), resources.Key().String(), list)
			}
		}
	}
	return b
}

// ids reads a set of strings (to 1.19), or a list of strings for each NUMA node.
func ids(held reflect.Value) []string {
	list := []string{}
	for each := held.MapRange(); each.Next(); {
		if each.Key().Kind() == reflect.String {
			list = append(list, each.Key().String())
			continue
		}
		for i := 0; i < each.Value().Len(); i++ { // not "range": the module files of old versions say go 1.21
			list = append(list, each.Value().Index(i).String())
		}
	}
	return list
}
