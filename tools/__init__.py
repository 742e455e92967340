"""What the project makes beside its code: generated messages, locks, the image."""
