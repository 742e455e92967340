"""``gateway doctor``: looks at a node once, and names what keeps its GPUs from pods. A daemon imports ``server`` if it is asked."""
