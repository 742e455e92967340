"""Several gateways on one node: who of them serves a resource, and how one takes over from another."""
