"""What was really said between a kubelet and a plugin."""
