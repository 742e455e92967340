"""Generated from protos/v1beta1/ by `make generate`."""
