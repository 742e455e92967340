"""The transports beneath: the control socket, HTTP, the service manager, gRPC's threads."""
