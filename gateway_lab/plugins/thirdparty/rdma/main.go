// k8s-rdma-shared-dev-plugin's own servers, without the look at the hardware that its main does first: it ends where there is none.
package main

import (
	"log"
	"os"
	"syscall"

	"github.com/Mellanox/k8s-rdma-shared-dev-plugin/pkg/resources"
)

func main() {
	manager := resources.NewResourceManager(os.Args[1], false)
	for _, step := range []func() error{manager.ReadConfig, manager.ValidateConfigs, manager.InitServers, manager.StartAllServers} {
		if err := step(); err != nil {
			log.Fatal(err)
		}
	}
	signals := resources.NewSignalNotifier(syscall.SIGTERM).Notify()
	<-signals
	_ = manager.StopAllServers()
}
