"""Which gateway of a node leads: the one that holds the locks."""
