"""What a gateway reports: its status, metrics and readiness, and the commands that ask for them."""
