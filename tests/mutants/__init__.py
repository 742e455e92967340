"""Mutants: each rule is broken on purpose, and a named test must notice.

``table.py`` has the rules that the kubelet imposes, and the shape of a row; the others have those of one topic each.
``__main__.py`` runs them all (``make mutants``).
"""
