"""The compatibility matrix, and its report."""
