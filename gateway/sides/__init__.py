"""Which API owns each GPU where one gateway serves both: the device plugin API or Dynamic Resource Allocation, never both."""
