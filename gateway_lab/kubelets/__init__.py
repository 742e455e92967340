"""Kubelets to run against, emulated and genuine."""
