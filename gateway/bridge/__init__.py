"""The bridge: other vendors' device plugins behind the gateway, which is the kubelet to them (``gateway --bridge DIR``)."""
