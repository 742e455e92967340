"""The transports beneath: the control socket, HTTP and the service manager."""
