"""Which of the gateways of a node leads: the one that holds the locks."""
