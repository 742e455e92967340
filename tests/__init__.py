"""The proofs: unit (tables of decisions), compat (dialects against genuine kubelets), mutants (tests of the tests)."""
