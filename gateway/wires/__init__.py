"""Connections to the outside (control socket, HTTP, the service manager's socket, the log), and gRPC."""
