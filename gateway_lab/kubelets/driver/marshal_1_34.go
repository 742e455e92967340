//go:build k8s1.34

package main

import (
	"fmt"

	"google.golang.org/protobuf/proto"
)

// marshal serialises a message of protoc-gen-go's generated code.
func marshal(message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no proto.Message", message)
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}
