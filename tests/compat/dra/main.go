// Prints the bytes of every message of the kubelet's APIs for DRA drivers, as the genuine Go types make them: see README.md.
package main

import (
	"encoding/json"
	"log"
	"os"
	"reflect"
)

type reply = map[string]any

// services is what golden looks at: one API at a time, because messages of several have the same names.
var services []reflect.Type

func main() {
	found := reply{}
	for name, api := range apis {
		services = api
		one, err := golden()
		if err != nil {
			log.Fatal(err)
		}
		found[name] = one
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	if err := out.Encode(found); err != nil {
		log.Fatal(err)
	}
}
