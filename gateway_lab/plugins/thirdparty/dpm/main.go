// The smallest plugin that KubeVirt's device-plugin-manager carries: two devices that are files in /dev.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/kubevirt/device-plugin-manager/pkg/dpm"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

var ids = []string{"null-0", "null-1"}

type lister struct{}

func (lister) GetResourceNamespace() string { return "dpm.example" }

func (lister) Discover(names chan dpm.PluginNameList) {
	names <- dpm.PluginNameList{"null"}
}

func (lister) NewPlugin(string) dpm.PluginInterface { return &plugin{} }

type plugin struct{}

func (*plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{}, nil
}

func (*plugin) PreStartContainer(context.Context, *v1beta1.PreStartContainerRequest) (*v1beta1.PreStartContainerResponse, error) {
	return &v1beta1.PreStartContainerResponse{}, nil
}

func (*plugin) GetPreferredAllocation(context.Context, *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	return &v1beta1.PreferredAllocationResponse{}, nil
}

func (*plugin) ListAndWatch(_ *v1beta1.Empty, stream v1beta1.DevicePlugin_ListAndWatchServer) error {
	var devices []*v1beta1.Device
	for _, id := range ids {
		devices = append(devices, &v1beta1.Device{ID: id, Health: v1beta1.Healthy})
	}
	if err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (*plugin) Allocate(_ context.Context, asked *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	answer := &v1beta1.AllocateResponse{}
	for _, container := range asked.ContainerRequests {
		given := &v1beta1.ContainerAllocateResponse{}
		for _, id := range container.DevicesIDs {
			if !slices.Contains(ids, id) {
				return nil, fmt.Errorf("unknown device %q", id)
			}
			given.Devices = append(given.Devices, &v1beta1.DeviceSpec{
				ContainerPath: "/dev/" + id, HostPath: os.DevNull, Permissions: "rw",
			})
		}
		answer.ContainerResponses = append(answer.ContainerResponses, given)
	}
	return answer, nil
}

func main() { dpm.NewManager(lister{}).Run() }
