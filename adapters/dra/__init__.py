"""The kubelet's APIs for DRA drivers: how claims and devices' health are spelled. Pure; a driver registers by ``adapters.pluginregistration``."""
