"""The life of a device: its states, how they follow from one another, and who may be given it."""
