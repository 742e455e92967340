"""The kubelet's APIs for DRA drivers: claims and the health of devices. Pure; a driver registers by ``adapters.pluginregistration``."""
