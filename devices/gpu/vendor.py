"""What differs between vendors: the names of GPUs, how a container gets them, and which partitions were removed on purpose.

A vendor's package has one ``Vendor``. GPUs without a vendor are ``PLAIN``: they are offered under the name that their backend
gives them, and a container gets their device nodes and no variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from devices.gpu.asked import Asked, by_nodes
from devices.gpu.model import GPU
from devices.model import ContainerAnswer
from devices.policy import Policy


class Vendor:
    """The rules of one vendor; this class has those of ``PLAIN``. Pure.

    ``name`` is the name of its backend, ``prefix`` that of its resource names (``nvidia.com/``).
    """

    name = prefix = ""

    def name_of(self, gpu: GPU, policy: Policy) -> str | None:  # noqa: ARG002 - for vendors' rules
        """Return the name under which a GPU or partition is offered; None if it isn't."""
        return None if gpu.partitioned else gpu.resource

    def check(self, gpus: Sequence[GPU], policy: Policy) -> None:
        """Check that the policy can name the vendor's GPUs of a node.

        Raises:
            NamingError: it can't. The message says why and what to do.
        """

    def given_names(self, policy: Policy) -> Collection[str]:  # noqa: ARG002 - as above
        """Return the names that an operator gave GPUs of this vendor."""
        return ()

    def was_repartitioned(self, uuid: str, gpus: Collection[GPU]) -> bool:  # noqa: ARG002 - as above
        """Return True if a missing device, known by its ID only, was a partition that was removed or replaced on purpose."""
        return False

    def answer(self, asked: Asked) -> ContainerAnswer:
        """Return how a container gets these GPUs (by their device nodes).

        Raises:
            RefusedError: it would start without a GPU.
        """
        return by_nodes(asked)

    def again(self, asked: Asked) -> ContainerAnswer:
        """Return a second answer, without CDI, for GPUs whose CDI names may not arrive.

        Raises:
            RefusedError: this kubelet can't carry it.
        """
        return by_nodes(asked)


PLAIN: Final = Vendor()


def vendor_of(resource: str, vendors: Iterable[Vendor]) -> Vendor:
    """Return the vendor of the GPUs with a resource name that their backend gave them."""
    for one in vendors:
        if resource.startswith(one.prefix):
            return one
    return PLAIN
