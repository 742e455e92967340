"""The lab: kubelets to try a device plugin on, scenarios to put it through, and what must hold all along.

Shipped with the gateway, because its users test with it too; never imported by the daemon.
"""
