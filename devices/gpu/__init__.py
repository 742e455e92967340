"""GPUs: one model, pure decisions about it, and one package per vendor."""
