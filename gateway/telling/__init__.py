"""What the gateway tells: its status, metrics, readiness and log."""
