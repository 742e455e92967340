"""Generated from protos/pluginregistration/ by `make generate`."""
