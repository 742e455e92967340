"""Two gateways in one container: one serves, the other is bound, has looked at the hardware, and stands by."""
