"""The devices of a node: the model, their sources, and what follows from their states (device-plugin-gateway)."""
