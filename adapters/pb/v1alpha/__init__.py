"""Generated from protos/v1alpha/ by `make generate`."""
