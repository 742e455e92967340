//go:build !k8s1.9

package main

import (
	"path/filepath"
	"reflect"
	"sync"
	_ "unsafe"

	"github.com/golang/glog"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	api "k8s.io/kubernetes/pkg/kubelet/apis/deviceplugin/v1alpha1"
	"k8s.io/kubernetes/pkg/kubelet/cm"
	"k8s.io/kubernetes/pkg/kubelet/deviceplugin"
)

// 1.8 asks for devices when a container starts, not when its pod is admitted.
const admitsDevices = false

//go:linkname readCheckpoint k8s.io/kubernetes/pkg/kubelet/cm.(*DevicePluginHandlerImpl).readCheckpoint
func readCheckpoint(*cm.DevicePluginHandlerImpl) error

// handler is 1.8's device plugin handler with its device plugin manager.
type handler struct {
	node    *node
	handler *cm.DevicePluginHandlerImpl
	manager *deviceplugin.ManagerImpl

	mu    sync.Mutex
	known counts
}

func newManager(n *node) (manager, error) {
	h := &handler{node: n, known: counts{}}
	genuine, err := cm.NewDevicePluginHandlerImpl(h.update)
	if err != nil {
		return nil, err
	}
	// The constructor has the path of the socket fixed. All it did is to make a manager, and to read the checkpoint that
	// may be there: put a manager for our directory in its place, and read our checkpoint instead.
	changed := field(genuine, "devicePluginManagerMonitorCallback").Interface().(deviceplugin.MonitorCallback)
	h.manager, err = deviceplugin.NewManagerImpl(n.socket(), changed)
	if err != nil {
		return nil, err
	}
	h.handler = genuine
	field(genuine, "devicePluginManager").Set(reflect.ValueOf(h.manager))
	held := field(genuine, "allocatedDevices")
	held.Set(reflect.MakeMap(held.Type()))
	if err := readCheckpoint(genuine); err != nil { // the constructor, too, goes on then
		glog.Warningf("No checkpoint read from %s: %v", filepath.Dir(n.socket()), err)
	}
	return h, nil
}

// update is how the handler tells the kubelet of a capacity.
func (h *handler) update(list v1.ResourceList) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, n := range quantities(list) {
		h.known[name] = n
	}
}

func (h *handler) start([]running) error { return h.handler.Start() }

func (h *handler) stop() error { return h.manager.Stop() }

func (h *handler) capacity() (capacity, allocatable counts) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := counts{}
	for name, known := range h.known {
		n[name] = known
	}
	return n, n
}

func (h *handler) admit(*v1.Pod, *v1.Container) error { return nil }

// run joins the answers as the container manager of 1.8 does in GetResources: what comes first for a path or a name wins.
func (h *handler) run(pod *v1.Pod, container *v1.Container) (options, error) {
	o := newOptions()
	answers, err := h.handler.Allocate(pod, container, h.node.active())
	if err != nil {
		return o, err
	}
	mounts, devices := sets.NewString(), sets.NewString()
	for _, answer := range answers {
		for _, spec := range specs(answer) {
			for _, d := range spec.Devices {
				if !devices.Has(d.ContainerPath) {
					devices.Insert(d.ContainerPath)
					o.Devices = append(o.Devices, device{d.ContainerPath, d.HostPath, d.Permissions})
				}
			}
			for _, m := range spec.Mounts {
				if !mounts.Has(m.ContainerPath) {
					mounts.Insert(m.ContainerPath)
					o.Mounts = append(o.Mounts, mount{m.ContainerPath, m.HostPath, m.ReadOnly})
				}
			}
			for name, value := range spec.Envs {
				if _, ok := o.Envs[name]; !ok {
					o.Envs[name] = value
				}
			}
		}
	}
	return o, nil
}

func specs(answer *api.AllocateResponse) []*api.DeviceRuntimeSpec {
	if answer == nil {
		return nil
	}
	return answer.Spec
}

func (h *handler) books() books {
	h.handler.Lock()
	defer h.handler.Unlock()
	b := books{}
	held := field(h.handler, "allocatedDevices") // resource -> pod -> container -> set of device IDs
	for _, resource := range held.MapKeys() {
		for _, pod := range held.MapIndex(resource).MapKeys() {
			containers := held.MapIndex(resource).MapIndex(pod)
			for _, container := range containers.MapKeys() {
				b.add(pod.String(), container.String(), resource.String(), ids(containers.MapIndex(container)))
			}
		}
	}
	return b
}

func ids(set reflect.Value) []string {
	list := []string{}
	for _, id := range set.MapKeys() {
		list = append(list, id.String())
	}
	return list
}
