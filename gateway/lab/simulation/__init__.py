"""A node under simulated time: the state machines, the ledger and model kubelets, a million schedules in minutes."""
