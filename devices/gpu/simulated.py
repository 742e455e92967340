"""The simulated backend: a node whose GPUs are written in a profile, and change when someone edits it.

It is how everything else can be tried without a GPU: users meet it first, tests and the laboratory use it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

import structlog

from devices.filewatch import FileWatch
from devices.gpu.allocation import preferred
from devices.gpu.answers import reached
from devices.gpu.model import GPU, listing
from devices.gpu.profile import Described, ProfileError, UnreadableError, find, parse, read
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Fault,
    Health,
    PreferredRequest,
    RefusedError,
    Sayable,
)
from devices.source import Fate, Inventory

_log = structlog.get_logger()


class SimulatedSource:
    """A ``DeviceSource`` over a profile: a shipped one's name, which stays as it is, or the path of one to be edited.

    A profile that is wrong, or gone, is logged as "profile rejected" with the reason, and what was known before stays
    (at first: nothing). A GPU that is no longer in it is no longer listed: it is lost, unless the profile says that it was
    withdrawn, or no longer has its resource name either.

    Raises:
        ProfileError: there is neither such a shipped profile nor such a file.
    """

    name = "simulated"

    def __init__(self, profile: str = "default") -> None:
        self._path, self._edited = find(profile)
        self._content: bytes | None = None
        self._rejected = ""
        self._profile: Mapping[str, Described] | None = None
        self._gpus: Mapping[str, Mapping[str, GPU]] = {}

    async def watch(self) -> AsyncGenerator[Inventory]:
        """Yield the inventory, and again after each edit that changes it."""
        if not self._edited:
            self._look()
            yield self._inventory()
            await asyncio.get_running_loop().create_future()
        last: Mapping[str, Described] | None = None
        with FileWatch(self._path) as file:
            while True:
                if not self._look():
                    file.look_again()
                if self._profile != last:
                    last = self._profile
                    yield self._inventory()
                await file.changed()

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        """Name the GPUs as the profile says: by CDI names, or in the variable that the vendor's runtime reads.

        Raises:
            RefusedError: this kubelet can't be told that.
        """
        return reached(resource, request.device_ids, self._gpus.get(resource, {}), sayable)

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Choose GPUs that are near to each other, and partitions of as few GPUs as possible.

        Raises:
            RefusedError: no choice meets the request.
        """
        return preferred(request, self._gpus.get(resource, {}))

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Do as if: a GPU that is well is made ready at once, any other can't be.

        Raises:
            RefusedError: FAILED_PRECONDITION, one of them is ill or gone.
        """
        gpus = self._gpus.get(resource, {})
        ill = [one for one in device_ids if one not in gpus or gpus[one].health is not Health.HEALTHY]
        if ill:
            raise RefusedError(
                Fault.FAILED_PRECONDITION,
                f"expected GPUs that are well, to be made ready for a container of {resource}, but "
                f"{', '.join(ill[:4])} isn't: repair it; the kubelet tries again",
            )

    def fate(self, resource: str, device_id: str) -> Fate:
        """Tell a GPU that the profile withdraws, by itself or with its resource name, from one that it lost."""
        if self._profile is None:
            return Fate.LOST
        described = self._profile.get(resource)
        return Fate.WITHDRAWN if described is None or device_id in described.withdrawn else Fate.LOST

    def _inventory(self) -> Inventory:
        described = self._profile or {}
        return {resource: listing(one.gpus, one.recovered, one.released) for resource, one in described.items()}

    def _look(self) -> bool:
        """Take over the profile as it is now, if it is to be used; False where it could not be read."""
        try:
            content = read(self._path)
            if content == self._content:
                return True
            self._content = content
            self._profile = parse(content, str(self._path))
        except ProfileError as error:
            self._content = None
            if str(error) != self._rejected:
                _log.warning("profile rejected", path=str(self._path), reason=str(error), kept=self._counts())
            self._rejected = str(error)
            return not isinstance(error, UnreadableError)
        self._rejected = ""
        self._gpus = {resource: {gpu.uuid: gpu for gpu in one.gpus} for resource, one in self._profile.items()}
        _log.info("profile read", path=str(self._path), gpus=self._counts())
        return True

    def _counts(self) -> dict[str, int]:
        return {resource: len(gpus) for resource, gpus in self._gpus.items()}
