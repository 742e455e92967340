"""``gateway doctor``: looks at a node once, and names what keeps its GPUs from pods. The daemon never imports it."""
