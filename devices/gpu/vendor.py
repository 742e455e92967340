"""What a vendor has of its own: how its GPUs are named, how a container gets them, and which partitions went on purpose.

A vendor's folder brings one ``Vendor``. GPUs that none of a source's vendors knows are ``PLAIN``: they are offered under the
name that their backend gives them, and a container gets their device nodes and never a variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from devices.gpu.asked import Asked, by_nodes
from devices.gpu.model import GPU
from devices.model import ContainerAnswer
from devices.policy import Policy


class Vendor:
    """One vendor's own rules; as they stand here, those of one that has none. Pure.

    ``name`` is what its backend is called, ``prefix`` how the resource names of its GPUs begin (``nvidia.com/``).
    """

    name = prefix = ""

    def name_of(self, gpu: GPU, policy: Policy) -> str | None:  # noqa: ARG002 - for vendors' rules
        """Say under which name a GPU or partition is offered (the backend's); None where it isn't."""
        return None if gpu.partitioned else gpu.resource

    def check(self, gpus: Sequence[GPU], policy: Policy) -> None:
        """Refuse the vendor's GPUs of a node that the policy can't name.

        Raises:
            NamingError: with what was expected, what came and what to do.
        """

    def given_names(self, policy: Policy) -> Collection[str]:  # noqa: ARG002 - as above
        """Return the names that an operator gave GPUs of this vendor."""
        return ()

    def was_repartitioned(self, uuid: str, gpus: Collection[GPU]) -> bool:  # noqa: ARG002 - as above
        """Whether a device that isn't there was a partition, and somebody made others or none; its ID alone is known."""
        return False

    def answer(self, asked: Asked) -> ContainerAnswer:
        """Say how a container gets these GPUs (their device nodes).

        Raises:
            RefusedError: it would start without a GPU.
        """
        return by_nodes(asked)

    def again(self, asked: Asked) -> ContainerAnswer:
        """Say once more, without CDI, which GPUs a container gets whose CDI names may not arrive.

        Raises:
            RefusedError: that can't be said.
        """
        return by_nodes(asked)


PLAIN: Final = Vendor()


def vendor_of(resource: str, vendors: Iterable[Vendor]) -> Vendor:
    """Return whose GPUs are offered under a name that their backend gave them."""
    for one in vendors:
        if resource.startswith(one.prefix):
            return one
    return PLAIN
