"""The Kubernetes API server: a thin client, and the features that use it. Imported only for such a feature.

The kubelet is served without waiting for anything in this package.
"""
