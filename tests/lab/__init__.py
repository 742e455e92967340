"""Tests of what tests the daemon: the laboratory, the tools, CI and the mutants' tables."""
