"""What is told of a device plugin that was examined."""
