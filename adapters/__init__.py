"""Dialects: how each version of the kubelet's device plugin API spells the neutral model. Nothing else (device-plugin-gateway)."""
