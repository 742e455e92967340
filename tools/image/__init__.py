"""The container image, made without a container engine and without root (docs/image.md).

``contents.py`` reads what goes into it, ``debian.py`` and ``python.py`` lay that out in a folder, ``sbom.py`` says what came
of it, and ``archive.py`` makes the layer and the OCI archive. The same inputs give the same digest: order, times, owners and
modes are those of this code, never of the machine that builds.
"""
