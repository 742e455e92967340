"""Dynamic resource allocation: the node's devices offered by ResourceSlices, and claims prepared for the kubelet.

Imported only with ``--dra``. Decisions are pure (``offer``, ``slices``, ``claims``, ``cdi``); ``drivers`` puts the parts together.
"""
