//go:build !k8s1.9

package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
)

// 1.8 has no metric. It logs "Got request for Device Plugin NAME" for each Register, before it looks at the version and
// the name: those lines are counted on their way to stderr, refused Registers included.
const registerLine = "Got request for Device Plugin "

var logged struct {
	sync.Mutex
	pipe  *os.File
	marks int
	seen  chan int
	n     counts
}

// countRegisters puts a pipe in place of os.Stderr, which is where glog writes. A panic still goes to file descriptor 2.
func countRegisters() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	stderr := os.Stderr
	os.Stderr = w
	logged.pipe, logged.seen, logged.n = w, make(chan int), counts{}
	go func() {
		for in := bufio.NewReader(r); ; {
			line, err := in.ReadString('\n')
			var mark int
			if _, none := fmt.Sscanf(line, "\x00%d", &mark); none == nil {
				logged.seen <- mark
				continue
			}
			if _, name, found := strings.Cut(line, registerLine); found {
				logged.Lock()
				logged.n[strings.TrimSpace(name)]++
				logged.Unlock()
			}
			_, _ = io.WriteString(stderr, line)
			if err != nil {
				return
			}
		}
	}()
	return nil
}

// registers waits until the log has been read up to now.
func registers() (counts, error) {
	logged.marks++
	if _, err := fmt.Fprintf(logged.pipe, "\x00%d\n", logged.marks); err != nil {
		return nil, err
	}
	for <-logged.seen != logged.marks {
	}
	logged.Lock()
	defer logged.Unlock()
	n := counts{}
	for name, count := range logged.n {
		n[name] = count
	}
	return n, nil
}
