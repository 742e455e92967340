"""The states of a device, how they change, and which requests they allow."""
