"""Generated from protos/dra/ by `make generate`."""
