"""Device plugins to try kubelets, and the bridge, with."""
