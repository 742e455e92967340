package main

import (
	"reflect"
	"sort"
	"unsafe"

	v1 "k8s.io/api/core/v1"
)

// manager is the genuine device manager, the same to the driver in every version.
type manager interface {
	start(running []running) error
	stop() error
	capacity() (capacity, allocatable counts)
	// admit is what the kubelet does at the admission of a pod, run what it does at the start of a container.
	admit(pod *v1.Pod, container *v1.Container) error
	run(pod *v1.Pod, container *v1.Container) (options, error)
	books() books
}

// books is which device IDs are held: by pod, container and resource name.
type books map[string]map[string]map[string][]string

func (b books) add(pod, container, resource string, ids []string) {
	if b[pod] == nil {
		b[pod] = map[string]map[string][]string{}
	}
	if b[pod][container] == nil {
		b[pod][container] = map[string][]string{}
	}
	all := append(b[pod][container][resource], ids...)
	sort.Strings(all)
	b[pod][container][resource] = all
}

func (b books) of(pod, container string) map[string][]string {
	if held := b[pod][container]; held != nil {
		return held
	}
	return map[string][]string{}
}

// options is what the runtime would be told about a container.
type options struct {
	Envs        map[string]string `json:"envs"`
	Mounts      []mount           `json:"mounts"`
	Devices     []device          `json:"devices"`
	Annotations map[string]string `json:"annotations"`
	CDIDevices  []string          `json:"cdi_devices"`
}

type mount struct {
	ContainerPath string `json:"container_path"`
	HostPath      string `json:"host_path"`
	ReadOnly      bool   `json:"read_only"`
}

type device struct {
	ContainerPath string `json:"container_path"`
	HostPath      string `json:"host_path"`
	Permissions   string `json:"permissions"`
}

func newOptions() options {
	return options{map[string]string{}, []mount{}, []device{}, map[string]string{}, []string{}}
}

func (o options) sorted() options {
	sort.Slice(o.Mounts, func(i, j int) bool { return o.Mounts[i].ContainerPath < o.Mounts[j].ContainerPath })
	sort.Slice(o.Devices, func(i, j int) bool { return o.Devices[i].ContainerPath < o.Devices[j].ContainerPath })
	sort.Strings(o.CDIDevices)
	return o
}

// run starts a container.
func run(m manager, pod *v1.Pod, container *v1.Container) (reply, error) {
	o, err := m.run(pod, container)
	if err != nil {
		stage := "start"
		if !admitsDevices {
			stage = "allocate"
		}
		return reply{"stage": stage}, err
	}
	return reply{"devices": m.books().of(string(pod.UID), container.Name), "options": o.sorted()}, nil
}

func quantities(list v1.ResourceList) counts {
	n := counts{}
	for name, quantity := range list {
		n[string(name)] = quantity.Value()
	}
	return n
}

// field gives an unexported field of what p points to, so that it can be read and set.
func field(p any, name string) reflect.Value {
	f := reflect.ValueOf(p).Elem().FieldByName(name)
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem()
}
