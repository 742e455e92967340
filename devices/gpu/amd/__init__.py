"""AMD's GPUs, read from sysfs."""
