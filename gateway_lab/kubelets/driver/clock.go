package main

import (
	"bytes"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// target is an allocatable count to wait for, and for how long.
type target struct {
	Resource string  `json:"resource"`
	Count    int64   `json:"count"`
	Seconds  float64 `json:"seconds"`
}

func (t target) deadline() time.Time {
	seconds := t.Seconds
	if seconds == 0 {
		seconds = 10
	}
	return time.Now().Add(time.Duration(seconds * float64(time.Second)))
}

// pause sleeps in the operating system: Go's own timers round up to a millisecond in an idle process.
func pause(d time.Duration) {
	t := syscall.NsecToTimespec(d.Nanoseconds())
	_ = syscall.Nanosleep(&t, nil) // woken early by a signal: looked again a little sooner
}

// spareThreads keeps the goroutines that sleep in the operating system from holding up the kubelet's own: each may hold
// one of the runtime's processors for a while.
func spareThreads() { runtime.GOMAXPROCS(runtime.NumCPU() + 4) }

// monotonic reads CLOCK_MONOTONIC, which other processes read too.
func monotonic() int64 {
	var t syscall.Timespec
	const clockMonotonic = 1
	_, _, _ = syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&t)), 0)
	return t.Nano()
}

// takingIn says whether the kubelet is about to write its checkpoint after a change of a device list: its books show the
// change before that. 1.8 writes none then; 1.9 writes it in place, and is left without pods when it is killed half-way.
func takingIn() bool {
	stacks := make([]byte, 1<<20)
	return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte(").genericDeviceUpdateCallback("))
}

// wait looks into the kubelet's books every 0.5 ms until the target is there, and then waits for the checkpoint.
func wait(m manager, t target) (reply, error) {
	for deadline := t.deadline(); ; pause(500 * time.Microsecond) {
		capacity, allocatable := m.capacity()
		seen := monotonic()
		r := reply{"capacity": capacity, "allocatable": allocatable}
		if allocatable[t.Resource] == t.Count {
			r["monotonic_ns"] = seen
			for takingIn() && time.Now().Before(deadline) {
				pause(100 * time.Microsecond)
			}
			return r, nil
		}
		if time.Now().After(deadline) {
			return r, fmt.Errorf("timed out: expected %d of %s allocatable, last saw %v of %v",
				t.Count, t.Resource, allocatable, capacity)
		}
	}
}

// connect tries to connect to a socket as a plugin would, and closes at once.
func connect(path string) error {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(fd) }()
	return syscall.Connect(fd, &syscall.SockaddrUnix{Name: path})
}

// lateness runs a 1 ms timer until it is stopped, and then says how late that was at worst, in milliseconds.
func lateness() (stop func() float64) {
	var stopped atomic.Bool
	worst := make(chan time.Duration, 1)
	go func() {
		var late time.Duration
		for !stopped.Load() {
			asleep := time.Now()
			pause(time.Millisecond)
			late = max(late, time.Since(asleep)-time.Millisecond)
		}
		worst <- late
	}()
	return func() float64 {
		stopped.Store(true)
		return milliseconds(<-worst)
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// measure, called before the manager's Start, takes the time from the first moment that kubelet.sock can be connected to
// until the target is in the books. The socket that a dead kubelet left behind refuses; it counts for nothing.
func measure(m manager, socket string, t target) later {
	deadline := t.deadline()
	var r reply
	done := make(chan error, 1)
	gap := func() error {
		for connect(socket) != nil {
			if time.Now().After(deadline) {
				return fmt.Errorf("timed out: expected to connect to %s", socket)
			}
			pause(100 * time.Microsecond)
		}
		first := time.Now()
		stop := lateness()
		for ; ; pause(500 * time.Microsecond) {
			_, allocatable := m.capacity()
			now := time.Now()
			if allocatable[t.Resource] == t.Count {
				r = reply{"gap_ms": milliseconds(now.Sub(first)), "timer_late_ms": stop()}
				return nil
			}
			if now.After(deadline) {
				return fmt.Errorf("timed out: expected %d of %s allocatable, last saw %v (a 1 ms timer was %.1f ms late)",
					t.Count, t.Resource, allocatable, stop())
			}
		}
	}
	go func() { done <- guard(gap) }()
	return func() (reply, error) {
		err := <-done
		return r, err
	}
}
