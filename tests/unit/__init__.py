"""Decisions, dialects and devices: tables and properties, without a kubelet."""
