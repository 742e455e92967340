"""What leaves the process (the control socket, HTTP, the service manager's socket, the log), and gRPC's threads beneath."""
