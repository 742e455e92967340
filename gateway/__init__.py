"""The gateway: a device plugin that registers with whichever kubelet the node runs (device-plugin-gateway)."""

VERSION = "0.1.0"
