"""Pass calls on to a plugin. If it is away, they wait as long as its devices are shielded."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import msgspec

from devices.model import ContainerAnswer, ContainerRequest, Fault, RefusedError
from gateway.bridge import judge, shield
from gateway.bridge.peer import PREPARE_TIME, AwayError, Peer
from gateway.bridge.plugin import FIRST_LIST, Bridged

if TYPE_CHECKING:
    from collections.abc import Collection

    from devices.model import Device, PreferredRequest

MOST_ANSWERS: Final = 256
"""Most answers of a resource that are remembered, if an operator wants them repeated."""


class BridgedResource(Bridged):
    """A bridged resource with its calls."""

    _listed_in: tuple[Device, ...] | None = None
    _listed: Collection[str] = frozenset()
    """The IDs of ``_listed_in``, computed once per list."""

    async def allocate(self, request: ContainerRequest) -> ContainerAnswer:
        """Let the plugin answer. It gets one call at a time, in order, because some plugins look for *the* pod that is waiting.

        Raises:
            RefusedError: the plugin refused, in its words; UNAVAILABLE if it is away for too long, DEADLINE_EXCEEDED if it
                hangs.
        """
        async with self._turn:
            return await self._answered(request)

    async def _answered(self, request: ContainerRequest) -> ContainerAnswer:
        while True:
            peer = self.peer
            if peer is None:
                earlier = self.answers.get(frozenset(request.device_ids)) if self.repeats else None
                if earlier is not None:
                    self.repeated += 1
                    self._log.warning(
                        "the plugin is away: an earlier answer is repeated", devices=len(request.device_ids)
                    )
                    return earlier
                await self._returned(shield.left(self.word, self.limits, time.monotonic()))
                continue
            if not await self._knows(request.device_ids, peer):
                continue
            try:
                answer = await peer.allocate(request, self.deadline)
            except AwayError as error:
                await self._let_down(peer, error)
                continue
            self._note(request, answer)
            return answer

    async def prefer(self, request: PreferredRequest) -> tuple[str, ...]:
        """Let the plugin choose. If it is away or lacks some of the devices, choose the first available ones.

        Raises:
            RefusedError: the plugin refused, in its words.
        """
        if self.peer is not None and self._heard.is_set() and not self._unlisted(request.available):
            try:
                return await self.peer.prefer(request)
            except AwayError as error:
                self._log.warning("the plugin didn't choose: the first available devices are taken", reason=str(error))
        must = request.must_include
        rest = [one for one in request.available if one not in frozenset(must)]
        return (*must, *rest[: max(0, request.size - len(must))])

    async def prepare(self, device_ids: tuple[str, ...]) -> None:
        """Let the plugin prepare devices. The kubelet calls again if that is refused.

        Raises:
            RefusedError: as for ``allocate``.
        """
        if not self.word.options.pre_start_required:
            return
        ends = time.monotonic() + PREPARE_TIME
        while True:
            if self.peer is None:
                await self._returned(
                    min(shield.left(self.word, self.limits, time.monotonic()), ends - time.monotonic())
                )
                continue
            peer = self.peer
            try:
                await peer.prepare(device_ids, max(0.1, ends - time.monotonic()))
            except AwayError as error:
                await self._let_down(peer, error)
            else:
                return

    async def _knows(self, device_ids: Collection[str], peer: Peer) -> bool:
        """Return True if the plugin may be asked for these devices; False if it went meanwhile.

        A call that waited for the plugin has devices of its earlier list. The plugin may have lost one of them, and for an
        unknown ID it may answer anything, or crash.

        Raises:
            RefusedError: the plugin lacks some of the devices.
        """
        if not self._heard.is_set():
            try:
                async with asyncio.timeout(FIRST_LIST):
                    await self._heard.wait()
            except TimeoutError:
                self._heard.set()
            if peer is not self.peer:
                return False
        if unlisted := self._unlisted(device_ids):
            raise RefusedError(
                Fault.NOT_FOUND,
                f"the plugin of {self.resource} came back without {min(unlisted)!r}. Look at the plugin's "
                "log; the kubelet has been told",
            )
        return True

    def _unlisted(self, device_ids: Collection[str]) -> Collection[str]:
        """Return the devices that the plugin doesn't list."""
        devices = self.word.devices
        if devices is not self._listed_in:
            self._listed_in, self._listed = devices, frozenset(one.id for one in devices or ())
        return [one for one in device_ids if one not in self._listed]

    async def _returned(self, seconds: float) -> None:
        """Wait until the plugin is back.

        Raises:
            RefusedError: it was not back in time.
        """
        self._back.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._back.wait()
        except TimeoutError:
            raise RefusedError(
                Fault.UNAVAILABLE,
                f"the plugin of {self.resource} is away ({self.word.why or 'never heard of'}). Look at "
                f"its pod. With bridge.repeat for {self.resource} this call would get the earlier answer",
            ) from None

    async def _let_down(self, peer: Peer, error: AwayError) -> None:
        """Handle a call that got no answer, because the connection broke or the plugin hangs. Return if the call should be tried again.

        Raises:
            RefusedError: the plugin hangs.
        """
        if error.hangs and await peer.answers():
            raise RefusedError(
                Fault.DEADLINE_EXCEEDED,
                f"the plugin of {self.resource} lives, but {error}: look at its log, or give it longer (bridge.deadlines)",
            )
        if peer is not self.peer:  # It registered again meanwhile.
            return
        if not error.hangs:
            self.went(str(error))
            return
        self.went(f"it hangs: {error}", peer)
        if not self.repeats:
            raise RefusedError(
                Fault.DEADLINE_EXCEEDED, f"the plugin of {self.resource} hangs: {error}; look at its pod, or end it"
            )

    def _note(self, request: ContainerRequest, answer: ContainerAnswer) -> None:
        if not self.repeats or len(msgspec.json.encode(answer)) > judge.LONGEST_REPEATED:
            return
        asked = frozenset(request.device_ids)
        before = self.answers.pop(asked, None)
        self.answers[asked] = answer
        while len(self.answers) > MOST_ANSWERS:
            self.answers.popitem(last=False)
        if before != answer:
            self._changed()
