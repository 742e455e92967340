"""Simulated GPUs, written in a profile."""
