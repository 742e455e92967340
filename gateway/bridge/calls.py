"""The calls that go through to a plugin; they wait for one that is away as long as the shield holds."""

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
"""Answers of a resource that are remembered, where an operator wants them repeated."""


class BridgedResource(Bridged):
    """A bridged resource that is called."""

    _listed_in: tuple[Device, ...] | None = None
    _listed: Collection[str] = frozenset()
    """The IDs of these devices: made once for each list."""

    async def allocate(self, request: ContainerRequest) -> ContainerAnswer:
        """Let the plugin answer, in the order of the calls and one at a time: some look for *the* pod that is waiting.

        Raises:
            RefusedError: in the plugin's words; UNAVAILABLE where it is away for too long, DEADLINE_EXCEEDED where it hangs.
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
        """Let the plugin choose; where it is away, or lacks some of them, the first ones that are available are as good as any.

        Raises:
            RefusedError: in the plugin's words.
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
        """Let the plugin make devices ready. The kubelet tries again what is refused.

        Raises:
            RefusedError: as ``allocate``.
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
        """Say whether a plugin may be asked for these; False where it went meanwhile.

        Who waited for one that came back asks by the list of before: the plugin may have lost a device, and may answer
        anything, or die, for one that it doesn't know.

        Raises:
            RefusedError: it doesn't have all of them.
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
        """Tell which of these the plugin doesn't list."""
        devices = self.word.devices
        if devices is not self._listed_in:
            self._listed_in, self._listed = devices, frozenset(one.id for one in devices or ())
        return [one for one in device_ids if one not in self._listed]

    async def _returned(self, seconds: float) -> None:
        """Wait for the plugin.

        Raises:
            RefusedError: it didn't come back.
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
        """A call was left without an answer: the connection broke, or the plugin hangs. Returns where to try again is right.

        Raises:
            RefusedError: it hangs.
        """
        if error.hangs and await peer.answers():
            raise RefusedError(
                Fault.DEADLINE_EXCEEDED,
                f"the plugin of {self.resource} lives, but {error}: look at its log, or give it longer (bridge.deadlines)",
            )
        if peer is not self.peer:  # Another registration came meanwhile.
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
