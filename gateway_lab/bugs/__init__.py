"""Bugs of kubelets that this project met, each shown happen on a kubelet: the track record."""
