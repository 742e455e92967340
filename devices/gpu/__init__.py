"""GPUs: one model of them, pure decisions over it, and one module per kind of hardware beneath."""
