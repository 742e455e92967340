"""The kubelet's APIs for DRA drivers: how claims, health and a driver's registration are spelled. Pure."""
