"""The bridge: other vendors' device plugins behind the gateway, which acts as their kubelet (``gateway --bridge DIR``)."""
