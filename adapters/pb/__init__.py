"""Generated from protos/ by `make generate`."""
