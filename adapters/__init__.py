"""Dialects: how each version of the kubelet's device plugin API encodes the neutral model (device-plugin-gateway)."""
