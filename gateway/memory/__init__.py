"""What the gateway remembers over its own end: the ledger, and when it is written."""
