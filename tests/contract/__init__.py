"""The contract: the whole daemon, seen from outside only.

Each row runs the real gateway from its command line on a node of its own: real files, folders, locks, inotify and control sockets, an
emulated kubelet, and a clock that is moved (``clock``). Only gRPC is replaced (``wire``), because it keeps its own threads and clock.
A row says what the kubelet, the containers and the operator see. It never says which part of the daemon did it.
"""
