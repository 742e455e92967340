"""Device plugins that break one promise of the kubelet's API each, on purpose: what the conformance test must find."""
