"""Emulated and genuine kubelets: the same scenarios, the same transcripts."""
