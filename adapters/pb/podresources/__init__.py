"""Generated from protos/podresources/ by `make generate`."""
