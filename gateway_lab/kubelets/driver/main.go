// Command kubelet is the genuine device manager of one Kubernetes version as a process of its own, on any directory,
// driven by JSON lines. The device manager is the unmodified k8s.io/kubernetes package; what is written here is the
// kubelet around it: the pods that are active, their admission and the start of their containers.
//
// README.md holds the protocol. The files that end in a version hold what differs: manager_1_9.go is what 1.9 and later
// versions do, until another file with a higher version says otherwise (its build tags tell).
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
)

// request is one line of stdin; README.md says which op uses which field.
type request struct {
	ID        json.RawMessage `json:"id"`
	Op        string          `json:"op"`
	Pods      []ask           `json:"pods"`
	Ready     *bool           `json:"ready"`
	Running   []running       `json:"running"`
	Gates     string          `json:"gates"`
	Numa      []int           `json:"numa"`
	Topology  string          `json:"topology"`
	Measure   *target         `json:"measure"`
	Pod       string          `json:"pod"`
	Container string          `json:"container"`
	Resource  string          `json:"resource"`
	Count     int64           `json:"count"`
	Limits    counts          `json:"limits"`
	Init      bool            `json:"init"`
	Seconds   float64         `json:"seconds"`
}

func (q *request) ask() ask { return ask{q.Pod, q.Container, q.Resource, q.Count, q.Limits, q.Init} }

func (q *request) isReady() bool { return q.Ready == nil || *q.Ready }

// running is a container that the runtime reports as running.
type running struct {
	Pod       string `json:"pod"`
	Container string `json:"container"`
	ID        string `json:"id"`
}

// counts holds a number for each resource name.
type counts map[string]int64

// reply is one line of stdout.
type reply map[string]any

// A later reply is one that an op cannot give at once: it blocks, and runs apart from the requests that follow.
type later func() (reply, error)

var (
	errNotStarted = errors.New("not started: expected a start request first")
	errPanicked   = errors.New("an earlier request made the kubelet panic: a real one would have died then; end this process")
)

// panicked is a panic of the kubelet's code, with the stack.
type panicked string

func (p panicked) Error() string { return string(p) }

type driver struct {
	node       node
	endServing func() // ends the pod-resources API

	mu      sync.Mutex // guards what follows
	manager manager
	dead    bool // a panic may have left the manager's locks locked

	admissions chan func()
	output     sync.Mutex
	stdout     *os.File
}

// do carries out one request, as far as that cannot block; the rest comes back as later.
func (d *driver) do(q *request) (reply, later, error) {
	switch q.Op {
	case "version":
		return reply{"kubernetes": kubernetesVersion(), "go": goVersion(), "dir": d.node.dir, "pid": os.Getpid()}, nil, nil
	case "golden":
		r, err := golden()
		return r, nil, err
	case "registers":
		r, err := registers()
		return reply{"registers": r}, nil, err
	case "quit":
		return reply{}, nil, nil
	case "start":
		return d.start(q)
	}
	m, err := d.current()
	if err != nil {
		return nil, nil, err
	}
	switch q.Op {
	case "ready":
		d.node.setReady(q.isReady())
		return reply{}, nil, nil
	case "admit":
		return d.admit(m, q)
	case "restart_container":
		pod, container, err := d.node.find(q.Pod, q.Container)
		if err != nil {
			return nil, nil, err
		}
		return nil, func() (reply, error) { return run(m, pod, container) }, nil
	case "remove":
		d.node.remove(q.Pod)
		return reply{}, nil, nil
	case "pods":
		return reply{"pods": m.books()}, nil, nil
	case "capacity":
		capacity, allocatable := m.capacity()
		return reply{"capacity": capacity, "allocatable": allocatable}, nil, nil
	case "wait":
		t := target{q.Resource, q.Count, q.Seconds}
		return nil, func() (reply, error) { return wait(m, t) }, nil
	case "stop":
		d.set(nil)
		d.endServing()
		return reply{}, nil, m.stop()
	}
	return nil, nil, fmt.Errorf("unknown op %q: README.md lists the ops", q.Op)
}

func (d *driver) current() (manager, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.dead:
		return nil, errPanicked
	case d.manager == nil:
		return nil, errNotStarted
	}
	return d.manager, nil
}

func (d *driver) set(m manager) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.manager = m
}

func (d *driver) start(q *request) (reply, later, error) {
	switch _, err := d.current(); err {
	case nil:
		return nil, nil, errors.New("already started: expected a stop request before the next start")
	case errPanicked:
		return nil, nil, err
	}
	if q.Gates != "" {
		if err := setGates(q.Gates); err != nil {
			return nil, nil, err
		}
	}
	d.node.setReady(q.isReady())
	d.node.numa, d.node.topology = q.Numa, q.Topology
	for _, a := range q.Pods {
		if _, _, err := d.node.put(a); err != nil {
			return nil, nil, err
		}
	}
	m, err := newManager(&d.node)
	if err != nil {
		return nil, nil, err
	}
	if d.endServing, err = servePodResources(m, d.node.podResources()); err != nil {
		return nil, nil, err
	}
	var measured later
	if q.Measure != nil {
		measured = measure(m, d.node.socket(), *q.Measure)
	}
	if err := m.start(q.Running); err != nil {
		d.endServing()
		return nil, nil, err
	}
	d.set(m)
	if measured != nil {
		return nil, measured, nil
	}
	return reply{}, nil, nil
}

// admit does what a kubelet does with a pod: admissions go one after another, in the order in which they came, since they
// are made by the kubelet's one sync loop; containers are started by workers of their own.
func (d *driver) admit(m manager, q *request) (reply, later, error) {
	pod, container, err := d.node.put(q.ask())
	if err != nil {
		return nil, nil, err
	}
	if !admitsDevices {
		return nil, func() (reply, error) { return run(m, pod, container) }, nil
	}
	admitted := make(chan error, 1)
	d.admissions <- func() {
		admitted <- guard(func() error { return m.admit(pod, container) })
	}
	return nil, func() (reply, error) {
		if err := <-admitted; err != nil {
			d.node.remove(q.Pod) // it has failed for good
			return reply{"stage": "allocate"}, err
		}
		return run(m, pod, container)
	}, nil
}

// answer writes one reply. The process ends when nobody reads them any more.
func (d *driver) answer(id json.RawMessage, r reply, err error) {
	if r == nil {
		r = reply{}
	}
	r["id"], r["ok"] = id, err == nil
	if err != nil {
		r["error"] = err.Error()
	}
	if p := panicked(""); errors.As(err, &p) {
		d.mu.Lock()
		d.dead = true
		d.mu.Unlock()
	}
	var line bytes.Buffer
	e := json.NewEncoder(&line)
	e.SetEscapeHTML(false)
	if err := e.Encode(r); err != nil {
		fmt.Fprintf(&line, "{\"id\":null,\"ok\":false,\"error\":%q}\n", err.Error())
	}
	d.output.Lock()
	defer d.output.Unlock()
	if _, err := d.stdout.Write(line.Bytes()); err != nil {
		os.Exit(1)
	}
}

// handle answers one line of stdin and says whether that was the last one.
func (d *driver) handle(line []byte) (last bool) {
	q := &request{}
	in := json.NewDecoder(bytes.NewReader(line))
	in.DisallowUnknownFields()
	if err := in.Decode(q); err != nil {
		d.answer(q.ID, nil, fmt.Errorf("expected one JSON object with the fields of README.md, got %.200q: %w", line, err))
		return false
	}
	var r reply
	var wait later
	err := guard(func() (err error) {
		r, wait, err = d.do(q)
		return err
	})
	if wait == nil {
		d.answer(q.ID, r, err)
		return q.Op == "quit"
	}
	go func() {
		err := guard(func() (err error) {
			r, err = wait()
			return err
		})
		d.answer(q.ID, r, err)
	}()
	return false
}

// guard turns a panic of the kubelet's code into an error.
func guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(fmt.Sprintf("panic: %v\n%s", p, debug.Stack()))
		}
	}()
	return f()
}

func kubernetesVersion() string {
	if b, ok := debug.ReadBuildInfo(); ok {
		for _, m := range b.Deps {
			if m.Path == "k8s.io/kubernetes" {
				return m.Version
			}
		}
	}
	return "unknown"
}

func goVersion() string {
	if b, ok := debug.ReadBuildInfo(); ok {
		return b.GoVersion
	}
	return "unknown"
}

// takeStdout gives what file descriptor 1 was, and sends all that is written to stdout from now on to stderr: 1.10 and
// 1.11 print a line of their own there.
func takeStdout() (*os.File, error) {
	fd, err := syscall.Dup(1)
	if err != nil {
		return nil, err
	}
	syscall.CloseOnExec(fd)
	if err := syscall.Dup3(2, 1, 0); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "stdout"), nil
}

func setUp() (*driver, error) {
	stdout, err := takeStdout()
	if err != nil {
		return nil, err
	}
	logFlags()
	dir := flag.String("dir", "", "where kubelet.sock and the checkpoint live (must exist)")
	flag.Parse()
	// Level 4 shows Register requests and the end of endpoints in every version.
	for name, value := range map[string]string{"logtostderr": "true", "v": "4"} {
		if err := flag.Set(name, value); err != nil {
			return nil, err
		}
	}
	if *dir == "" {
		return nil, errors.New("expected -dir DIR")
	}
	abs, err := filepath.Abs(*dir)
	if err != nil {
		return nil, err
	}
	spareThreads()
	if err := countRegisters(); err != nil {
		return nil, err
	}
	return &driver{node: node{dir: abs, ready: 1}, admissions: make(chan func(), 1<<16), stdout: stdout}, nil
}

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM)
	go func() {
		<-end
		os.Exit(0)
	}()
	d, err := setUp()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubelet:", err)
		os.Exit(2)
	}
	go func() {
		for admission := range d.admissions {
			admission()
		}
	}()
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(make([]byte, 1<<16), 1<<26)
	for in.Scan() {
		if d.handle(in.Bytes()) {
			os.Exit(0)
		}
	}
	if err := in.Err(); err != nil {
		fmt.Fprintln(os.Stderr, "kubelet: reading stdin:", err)
		os.Exit(2)
	}
}
