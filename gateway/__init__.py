"""The gateway: a device plugin that registers with whichever kubelet the node runs (device-plugin-gateway)."""
