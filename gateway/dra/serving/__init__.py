"""Drivers that the kubelet finds, and other processes that have the name of one."""
