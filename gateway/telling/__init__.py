"""What the gateway tells: its status, metrics and readiness; and who asks."""
