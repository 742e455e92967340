//go:build !k8s1.34

package main

import "fmt"

// marshal serialises a message of gogo's generated code.
func marshal(message any) ([]byte, error) {
	m, ok := message.(interface{ Marshal() ([]byte, error) })
	if !ok {
		return nil, fmt.Errorf("%T has no Marshal", message)
	}
	return m.Marshal()
}
