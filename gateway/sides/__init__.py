"""Which API gives each GPU if the gateway serves both the device plugin API and Dynamic Resource Allocation."""
