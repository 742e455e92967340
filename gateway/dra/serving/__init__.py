"""Register our DRA drivers with the kubelet, unless other processes have their names."""
