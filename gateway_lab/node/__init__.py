"""A genuine single-node Kubernetes for tests, in namespaces of its own: nothing is installed, nothing is left behind.

``python -m gateway_lab.node -- COMMAND`` starts it and runs COMMAND inside; there ``Node.here()`` is the handle on it.
"""

from gateway_lab.node.cluster import Node, NodeError

__all__ = ["Node", "NodeError"]
