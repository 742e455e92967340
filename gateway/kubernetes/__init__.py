"""The Kubernetes API server as a partner: a thin client, and what goes by it. Imported where a feature needs it, and nowhere else.

Nothing that serves the kubelet waits for anything in here.
"""
