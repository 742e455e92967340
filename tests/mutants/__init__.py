"""Mutants: each rule of the kubelet's behaviour is broken on purpose, and a named test must notice.

``table.py`` has the rules and the mutants, ``__main__.py`` runs them (``make mutants``).
"""
