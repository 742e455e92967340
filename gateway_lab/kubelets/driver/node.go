package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// node is what a device manager is told by the rest of its kubelet. A pod is never changed, only replaced: the manager
// reads pods in goroutines of its own.
type node struct {
	dir  string
	numa []int
	// topology is the policy of the topology manager; admits is that manager's admission of a pod, if there is one.
	topology string
	admits   func(*v1.Pod) error
	ready    int32

	mu   sync.Mutex
	pods []*v1.Pod
}

// ask is a container of a pod, with the devices it asks for; none, if that is known already.
type ask struct {
	Pod       string `json:"pod"`
	Container string `json:"container"`
	Resource  string `json:"resource"`
	Count     int64  `json:"count"`
	Limits    counts `json:"limits"`
	Init      bool   `json:"init"`
}

func (a ask) resources() v1.ResourceList {
	list := v1.ResourceList{}
	for name, n := range a.Limits {
		list[v1.ResourceName(name)] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	if a.Resource != "" {
		list[v1.ResourceName(a.Resource)] = *resource.NewQuantity(a.Count, resource.DecimalSI)
	}
	return list
}

func (n *node) socket() string { return filepath.Join(n.dir, "kubelet.sock") }

// podResources is where a kubelet has that API: its other folder beside device-plugins.
func (n *node) podResources() string {
	return filepath.Join(filepath.Dir(n.dir), "pod-resources", "kubelet.sock")
}

func (n *node) setReady(ready bool) {
	var value int32
	if ready {
		value = 1
	}
	atomic.StoreInt32(&n.ready, value)
}

// AddSource and AllReady make node the kubelet's config.SourcesReady.
func (n *node) AddSource(string) {}

func (n *node) AllReady() bool { return atomic.LoadInt32(&n.ready) != 0 }

// active is what a kubelet's pod manager calls the active pods.
func (n *node) active() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]*v1.Pod{}, n.pods...)
}

// GetPods, GetActivePods and GetPodByName make node the PodsProvider of the pod-resources API.
func (n *node) GetPods() []*v1.Pod { return n.active() }

func (n *node) GetActivePods() []*v1.Pod { return n.active() }

func (n *node) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, p := range n.active() {
		if p.Namespace == namespace && p.Name == name {
			return p, true
		}
	}
	return nil, false
}

func (n *node) index(uid string) int {
	for i, p := range n.pods {
		if string(p.UID) == uid {
			return i
		}
	}
	return -1
}

func (n *node) remove(uid string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if i := n.index(uid); i >= 0 {
		n.pods = append(n.pods[:i:i], n.pods[i+1:]...)
	}
}

// containers gives the containers of a pod, init containers or not.
func containers(p *v1.Pod, init bool) *[]v1.Container {
	if init {
		return &p.Spec.InitContainers
	}
	return &p.Spec.Containers
}

func named(list []v1.Container, name string) *v1.Container {
	for i := range list {
		if list[i].Name == name {
			return &list[i]
		}
	}
	return nil
}

// put makes the pod and the container active, and gives them as they are now.
func (n *node) put(a ask) (*v1.Pod, *v1.Container, error) {
	if a.Pod == "" || a.Container == "" {
		return nil, nil, errors.New("expected pod and container")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	i := n.index(a.Pod)
	if i < 0 {
		n.pods = append(n.pods, &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: a.Pod, Namespace: "default", UID: types.UID(a.Pod)},
		})
		i = len(n.pods) - 1
	}
	pod := n.pods[i].DeepCopy()
	n.pods[i] = pod
	list := containers(pod, a.Init)
	c := named(*list, a.Container)
	if c == nil {
		*list = append(*list, v1.Container{Name: a.Container})
		c = &(*list)[len(*list)-1]
	}
	if asked := a.resources(); len(asked) > 0 {
		if c.Resources.Limits == nil {
			c.Resources = v1.ResourceRequirements{Limits: v1.ResourceList{}, Requests: v1.ResourceList{}}
		}
		for name, quantity := range asked {
			c.Resources.Limits[name], c.Resources.Requests[name] = quantity, quantity
		}
	}
	return pod, c, nil
}

func (n *node) find(uid, container string) (*v1.Pod, *v1.Container, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if i := n.index(uid); i >= 0 {
		for _, init := range []bool{false, true} {
			if c := named(*containers(n.pods[i], init), container); c != nil {
				return n.pods[i], c, nil
			}
		}
	}
	return nil, nil, fmt.Errorf("no container %q of a pod %q is active: expected one that was admitted, or named at start", container, uid)
}
