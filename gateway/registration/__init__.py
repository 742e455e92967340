"""Registration of one resource with the kubelet: when, in which dialect, and what the resource's server answers."""
