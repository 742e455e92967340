"""The demo: its story, its node and its picture."""
