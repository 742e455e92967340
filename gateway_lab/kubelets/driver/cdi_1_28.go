//go:build k8s1.28

package main

func addCDI(o *options, t *told) {
	for _, d := range t.CDIDevices {
		o.CDIDevices = append(o.CDIDevices, d.Name)
	}
}
