"""What a node is put through: faults, scenarios, hops, attacks, and what must hold."""
