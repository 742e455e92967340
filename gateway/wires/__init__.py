"""What leaves the process: the control socket, HTTP, the service manager's socket, and the log."""
