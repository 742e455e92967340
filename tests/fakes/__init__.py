"""Stand-ins for what a test machine lacks: GPUs, as a vendor's library or the kernel shows them."""
