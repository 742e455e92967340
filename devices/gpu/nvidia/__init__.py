"""NVIDIA's GPUs: found, watched and judged through NVML, and handed to containers."""
