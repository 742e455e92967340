// Command dramanager is the DRA manager and the plugin manager of a real kubelet, driven by JSON lines: see README.md.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

type request struct {
	ID    int    `json:"id"`
	Op    string `json:"op"`
	Claim string `json:"claim"`
}

type ready struct{}

func (ready) AddSource(string) {}
func (ready) AllReady() bool   { return true }

// pods are those that are active, each by the one claim that it has. They outlive this process.
type pods struct {
	sync.Mutex
	path   string
	claims map[string]bool
}

func (p *pods) list() []*v1.Pod {
	p.Lock()
	defer p.Unlock()
	var found []*v1.Pod
	for claim := range p.claims {
		found = append(found, pod(claim))
	}
	return found
}

func (p *pods) set(claim string, active bool) {
	p.Lock()
	defer p.Unlock()
	p.claims[claim] = true
	if !active {
		delete(p.claims, claim)
	}
	text, err := json.Marshal(p.claims)
	check(err)
	check(os.WriteFile(p.path, text, 0o600))
}

func pod(claim string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: claim, UID: types.UID("pod-" + claim)},
		Spec: v1.PodSpec{
			Containers: []v1.Container{{
				Name:      "main",
				Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu"}}},
			}},
			ResourceClaims: []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}},
		},
	}
}

func main() {
	ctx := context.Background()
	folder, registry, node, kubeconfig := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	access, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	check(err)
	access.ContentType, access.AcceptContentTypes = "application/json", "application/json"
	client, err := kubernetes.NewForConfig(access)
	check(err)
	manager, err := dra.NewManager(klog.Background(), client, folder)
	check(err)
	active := &pods{path: filepath.Join(folder, "pods.json"), claims: map[string]bool{}}
	if text, err := os.ReadFile(active.path); err == nil {
		check(json.Unmarshal(text, &active.claims))
	}
	own := func(context.Context) (*v1.Node, error) {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, UID: "node-uid"}}, nil
	}
	check(manager.Start(ctx, active.list, own, ready{}))
	plugins := pluginmanager.NewPluginManager(registry, record.NewFakeRecorder(1000))
	plugins.AddHandler(registerapi.DRAPlugin, manager.GetWatcherHandler())
	go plugins.Run(ctx, ready{}, make(chan struct{}))
	var mutex sync.Mutex
	out := json.NewEncoder(os.Stdout)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var asked request
		check(json.Unmarshal(in.Bytes(), &asked))
		go func() {
			err := do(ctx, manager, active, asked)
			text := ""
			if err != nil {
				text = err.Error()
			}
			mutex.Lock()
			defer mutex.Unlock()
			check(out.Encode(map[string]any{"id": asked.ID, "error": text}))
		}()
	}
}

func do(ctx context.Context, manager *dra.Manager, active *pods, asked request) error {
	switch asked.Op {
	case "prepare":
		active.set(asked.Claim, true)
		return manager.PrepareResources(ctx, pod(asked.Claim))
	case "unprepare":
		err := manager.UnprepareResources(ctx, pod(asked.Claim))
		if err == nil {
			active.set(asked.Claim, false)
		}
		return err
	}
	return fmt.Errorf("unknown op %q", asked.Op)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
