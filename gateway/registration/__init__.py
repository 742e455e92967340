"""Registration of one resource with the kubelet: when, in which dialect, and what is served over it."""
