// A package with functions that have no body (they are bound by go:linkname) must hold an assembly file.
