"""What the node has to give: devices, where they come from, and what each of their states means (device-plugin-gateway)."""
