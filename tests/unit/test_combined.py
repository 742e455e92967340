"""Several sources as one: each is on its own, and no resource is ever another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from devices import combined
from devices.boards import Place
from devices.combined import Combined
from devices.model import ContainerAnswer, ContainerRequest, Device, Fault, PreferredRequest, RefusedError, Sayable
from devices.policy import Policy
from devices.source import (
    NOT_TOLD,
    DeviceSource,
    Facts,
    Fate,
    GiveUpError,
    Hindrance,
    Inventory,
    Listing,
    Partial,
    listed,
    unclaimed,
)

GUARD_S = 10.0
GPU, OTHER, FILE = "nvidia.com/gpu", "amd.com/gpu", "example.com/null"
REQUEST = ContainerRequest(("d",))
NOTHING = Sayable(frozenset())


def listing(*ids: str) -> Listing:
    return Listing(tuple(Device(one) for one in ids))


class Source(DeviceSource):
    """Says what a test puts into it, claims what has its prefix, and answers with its name."""

    def __init__(self, name: str, prefix: str, fate: Fate = Fate.UNKNOWN) -> None:
        self.name, self._prefix, self._fate = name, prefix, fate
        self.words: asyncio.Queue[Inventory | Exception | None] = asyncio.Queue()
        self.asked = 0
        self.closed = 0
        self.hindered: tuple[Hindrance, ...] = ()
        self.hangs = False
        self.places = ""
        self.adopted: list[Policy] = []

    def lists(self, **resources: str) -> None:
        """Put an inventory; ``gpu="a b"`` are the devices a and b of <prefix>gpu."""
        self.words.put_nowait({self._prefix + name: listing(*ids.split()) for name, ids in resources.items()})

    async def watch(self) -> AsyncGenerator[Inventory]:
        self.asked += 1
        try:
            while (word := await self.words.get()) is not None:
                if isinstance(word, Exception):
                    raise word
                yield word
        finally:
            self.closed += 1

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        return ContainerAnswer(envs={"BY": self.name})

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        return (self.name,)

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        raise RefusedError(Fault.FAILED_PRECONDITION, self.name)

    def fate(self, resource: str, device_id: str) -> Fate:
        return self._fate

    def place(self, device_id: str) -> Place | None:
        return Place(device_id) if device_id in self.places else None

    def claims(self, resource: str) -> bool:
        return resource.startswith(self._prefix)

    def hindrances(self) -> tuple[Hindrance, ...]:
        return self.hindered

    def facts(self, resource: str) -> Callable[[str], Facts]:
        return lambda _: Facts(product=self.name)

    def adopt(self, policy: Policy) -> None:
        self.adopted.append(policy)

    async def release(self, device_ids: Collection[str]) -> Collection[str]:
        return [f"{self.name} released {' '.join(device_ids)}"]

    async def acquire(self, device_ids: Collection[str]) -> Collection[str]:
        return [f"{self.name} acquired {' '.join(device_ids)}"]


class Watched:
    """Two sources as one, with its watch open."""

    def __init__(self) -> None:
        self.gpus = Source("nvidia", "nvidia.com/", Fate.LOST)
        self.files = Source("generic", "example.com/", Fate.WITHDRAWN)
        self.both = Combined([self.gpus, self.files])
        self.inventories = self.both.watch()

    async def next(self) -> Inventory:
        async with asyncio.timeout(GUARD_S):
            return await anext(self.inventories)

    async def owner(self, resource: str) -> str:
        """Who answers for a resource; each call goes the same way."""
        async with asyncio.timeout(GUARD_S):
            answer = await self.both.answer(resource, REQUEST, NOTHING)
        assert await self.both.prefer(resource, PreferredRequest(("d",), (), 1)) == (answer.envs["BY"],)
        with pytest.raises(RefusedError, match=answer.envs["BY"]):
            await self.both.prepare(resource, ("d",))
        assert self.both.facts(resource)("d") == Facts(product=answer.envs["BY"])
        assert self.both.claims(resource)
        return answer.envs["BY"]


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(combined, "RETRY_S", 0.01)
    one = Watched()
    yield one
    await one.inventories.aclose()


def ids(inventory: Inventory) -> dict[str, str]:
    return {name: " ".join(device.id for device in one.devices) for name, one in inventory.items()}


# Who is silent keeps nobody else from anything.


async def test_a_silent_source_keeps_no_other_from_being_offered(watched: Watched) -> None:
    watched.files.lists(null="/dev/null")
    first = await watched.next()
    assert ids(first) == {FILE: "/dev/null"}
    assert isinstance(first, Partial)
    watched.gpus.lists(gpu="a b")
    both = await watched.next()
    assert (ids(both), isinstance(both, Partial)) == ({GPU: "a b", FILE: "/dev/null"}, False)
    watched.files.lists(null="/dev/null /dev/zero")
    assert ids(await watched.next()) == {GPU: "a b", FILE: "/dev/null /dev/zero"}


async def test_only_what_the_silent_one_could_own_is_not_looked_yet(watched: Watched) -> None:
    watched.files.lists(null="/dev/null")
    partial = await watched.next()
    assert listed(partial, GPU) is None
    assert listed(partial, FILE) == listing("/dev/null")
    assert listed(partial, "example.com/was-a-rule") == listed(partial, "nobody.has/it") == Listing(())
    watched.gpus.lists(other="a")
    whole = await watched.next()
    assert listed(whole, GPU) == Listing(())
    assert listed(partial, GPU) is None  # What was told stays as it was told.


async def test_nothing_is_told_before_anybody_looked(watched: Watched) -> None:
    pending = asyncio.ensure_future(watched.next())
    watched.gpus.words.put_nowait(OSError("broken"))
    while not watched.gpus.closed:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    assert not pending.done()
    watched.files.lists()
    assert ids(await pending) == {}


@pytest.mark.parametrize(
    ("end", "event", "reason"),
    [
        pytest.param(
            OSError("broken"), "a device source failed", "it failed (OSError('broken')): its last", id="raises"
        ),
        pytest.param(None, "a device source ended", "it ended, which it must not", id="ends"),
        pytest.param(
            GiveUpError("no driver"), "a device source gave up", "it gave up, and is asked again", id="gives up"
        ),
    ],
)
async def test_one_that_fails_takes_no_other_along_and_comes_back(
    watched: Watched, end: Exception | None, event: str, reason: str
) -> None:
    watched.gpus.lists(gpu="a b c")
    watched.files.lists(null="/dev/null")
    assert ids(await watched.next()) == {GPU: "a b c", FILE: "/dev/null"}
    with capture_logs() as logs:
        watched.gpus.words.put_nowait(end)
        assert ids(await watched.next()) == {GPU: "a b c", FILE: "/dev/null"}
    (hindrance,) = watched.both.hindrances()
    assert hindrance.source == "nvidia"
    assert hindrance.reason.startswith(reason)
    assert hindrance.held_up is isinstance(end, GiveUpError)
    assert logs[0]["event"].startswith(event)
    watched.files.lists(null="/dev/null /dev/zero")
    assert ids(await watched.next())[FILE] == "/dev/null /dev/zero"
    watched.gpus.lists(gpu="a")  # An hour later, with fewer devices.
    assert ids(await watched.next()) == {GPU: "a", FILE: "/dev/null /dev/zero"}
    assert (watched.gpus.asked, watched.both.hindrances()) == (2, ())
    watched.gpus.words.put_nowait(OSError("broken"))
    await watched.next()
    assert not watched.both.hindrances()[0].held_up  # What it gave up before is over.


async def test_who_gives_up_is_asked_again_ever_more_seldom(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(combined, "RETRY_S", 5.0)
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    watched.files.lists(null="/dev/null")
    for _ in range(6):
        watched.gpus.words.put_nowait(GiveUpError("no driver"))
    watched.gpus.lists(gpu="a")
    while GPU not in await watched.next():
        pass
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    watched.gpus.words.put_nowait(GiveUpError("no driver"))
    await watched.next()
    await sleep(0)
    assert waits[6] == 5.0


async def end_of(watched: Watched) -> GiveUpError | None:
    """What ends the watch; None where an inventory comes first."""
    while True:
        try:
            inventory = await watched.next()
        except GiveUpError as error:
            return error
        if not isinstance(inventory, Partial) or watched.both.hindrances():
            return None


@pytest.mark.parametrize(
    ("files", "status", "ends"),
    [
        pytest.param({"null": "/dev/null"}, 1, False, id="others have devices"),
        pytest.param({"null": ""}, 1, True, id="nobody else has one: rules may come, and there are none"),
        pytest.param({"null": "/dev/null"}, 75, True, id="a new process is what it needs"),
    ],
)
async def test_who_gives_up_ends_the_process_only_where_that_costs_no_other_device(
    watched: Watched, files: dict[str, str], status: int, ends: bool
) -> None:
    watched.files.lists(**files)
    assert isinstance(await watched.next(), Partial)
    watched.gpus.words.put_nowait(GiveUpError("no driver", status))
    error = await end_of(watched)
    assert (error is not None and error.status == status) is ends


async def test_who_gives_up_while_another_is_silent_waits_for_what_that_one_has(watched: Watched) -> None:
    pending = asyncio.ensure_future(watched.next())
    watched.gpus.words.put_nowait(GiveUpError("no driver"))
    while watched.both.hindrances()[0].reason == NOT_TOLD:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    await asyncio.wait({pending}, timeout=0.01)  # nothing must happen
    assert not pending.done()
    watched.files.lists(null="")
    with pytest.raises(GiveUpError, match="no driver"):
        await pending


async def test_who_told_of_its_devices_once_and_gives_up_keeps_them(watched: Watched) -> None:
    watched.gpus.lists(gpu="")
    watched.files.lists(null="")
    while isinstance(await watched.next(), Partial):
        pass
    watched.gpus.words.put_nowait(GiveUpError("no driver"))
    assert await end_of(watched) is None


async def test_it_gives_up_when_all_its_sources_have(watched: Watched) -> None:
    watched.gpus.words.put_nowait(GiveUpError("no driver"))
    watched.files.words.put_nowait(GiveUpError("no files"))
    with pytest.raises(GiveUpError):
        await watched.next()


async def test_an_answer_that_hangs_holds_up_no_other_resource(watched: Watched) -> None:
    watched.gpus.hangs = True
    hanging = asyncio.ensure_future(watched.both.answer(GPU, REQUEST, NOTHING))
    assert await watched.owner(FILE) == "generic"
    assert not hanging.done()
    hanging.cancel()


async def test_its_end_closes_every_source(watched: Watched) -> None:
    watched.files.lists(null="/dev/null")
    await watched.next()
    await watched.inventories.aclose()
    assert (watched.gpus.closed, watched.files.closed) == (1, 1)


# Whose a resource is.


async def test_before_anybody_listed_it_a_resource_is_whose_name_it_has(watched: Watched) -> None:
    assert (await watched.owner(GPU), await watched.owner(FILE)) == ("nvidia", "generic")


async def test_what_became_of_a_device_is_asked_of_who_listed_it(watched: Watched) -> None:
    watched.files.lists(null="/dev/null")
    await watched.next()
    assert watched.both.fate(FILE, "d") is Fate.WITHDRAWN
    assert watched.both.fate("nobody.has/it", "d") is Fate.LOST


async def test_who_listed_a_resource_keeps_it(watched: Watched) -> None:
    """Also when it lists it no more: it knows what became of the devices."""
    watched.gpus.words.put_nowait({OTHER: listing("a")})
    await watched.next()
    assert await watched.owner(OTHER) == "nvidia"
    watched.gpus.lists(gpu="a")
    watched.files.lists()
    await watched.next()
    assert await watched.owner(OTHER) == "nvidia"
    assert watched.both.fate(OTHER, "a") is Fate.LOST
    watched.files.words.put_nowait({OTHER: listing("b")})
    assert ids(await watched.next()) == {GPU: "a", OTHER: "b"}
    assert await watched.owner(OTHER) == "generic"


@pytest.mark.parametrize(
    ("fates", "fate"),
    [
        pytest.param((Fate.UNKNOWN, Fate.WITHDRAWN), Fate.WITHDRAWN, id="who can tell says so"),
        pytest.param((Fate.LOST, Fate.WITHDRAWN), Fate.LOST, id="one doubts it"),
        pytest.param((Fate.UNKNOWN, Fate.UNKNOWN), Fate.LOST, id="nobody can tell"),
    ],
)
def test_what_nobody_listed_here_is_lost_unless_all_who_can_tell_say_otherwise(
    fates: tuple[Fate, Fate], fate: Fate
) -> None:
    assert Combined([Source("one", "", fates[0]), Source("other", "", fates[1])]).fate(GPU, "a") is fate


async def test_of_two_that_claim_a_name_the_one_that_has_not_looked_is_meant() -> None:
    first, second = Source("first", ""), Source("second", "")
    both = Combined([first, second])
    watch = both.watch()
    assert (await both.answer(GPU, REQUEST, NOTHING)).envs == {"BY": "first"}
    first.words.put_nowait({OTHER: listing("a")})
    await anext(watch)
    assert (await both.answer(GPU, REQUEST, NOTHING)).envs == {"BY": "second"}
    second.words.put_nowait({})
    await anext(watch)
    assert (await both.answer(GPU, REQUEST, NOTHING)).envs == {"BY": "first"}
    await watch.aclose()


CALLS: list[tuple[str, Callable[[Combined], Awaitable[Any]]]] = [
    ("answer", lambda both: both.answer("nobody.has/it", REQUEST, NOTHING)),
    ("prefer", lambda both: both.prefer("nobody.has/it", PreferredRequest(("d",), (), 1))),
    ("prepare", lambda both: both.prepare("nobody.has/it", ("d",))),
]


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in CALLS])
async def test_what_nobody_claims_is_refused(watched: Watched, call: Callable[[Combined], Awaitable[Any]]) -> None:
    watched.gpus.lists(gpu="a")
    watched.files.lists(null="/dev/null")
    await watched.next()
    with pytest.raises(RefusedError, match="none offers nobody") as refused:
        await call(watched.both)
    assert refused.value.fault is Fault.NOT_FOUND
    assert str(refused.value) == str(unclaimed("nobody.has/it"))
    assert watched.both.facts("nobody.has/it")("d") == Facts()
    assert not watched.both.claims("nobody.has/it")


async def test_what_nobody_claims_is_asked_of_the_source_whose_hardware_it_is(watched: Watched) -> None:
    """The name is another now, and a kubelet 1.8 asks at each start of a container."""
    watched.files.places = "d e"
    answer = await watched.both.answer("old.com/name", REQUEST, NOTHING)
    assert answer.envs == {"BY": "generic"}
    with pytest.raises(RefusedError, match="generic"):
        await watched.both.prepare("old.com/name", ("d",))
    with pytest.raises(RefusedError, match="none offers old"):
        await watched.both.answer("old.com/name", ContainerRequest(("d", "x")), NOTHING)
    assert (await watched.both.answer(GPU, REQUEST, NOTHING)).envs == {"BY": "nvidia"}
    assert watched.both.place("d") == Place("d")


async def test_of_two_that_list_a_resource_the_first_keeps_it_and_people_are_told(watched: Watched) -> None:
    watched.files.words.put_nowait({GPU: listing("/dev/nvidia0")})
    assert ids(await watched.next()) == {GPU: "/dev/nvidia0"}
    with capture_logs() as logs:
        watched.gpus.lists(gpu="a", more="m")
        assert ids(await watched.next()) == {GPU: "/dev/nvidia0", "nvidia.com/more": "m"}
        watched.gpus.lists(gpu="a b")
        assert ids(await watched.next()) == {GPU: "/dev/nvidia0"}
    told = (
        "nvidia.com/gpu of generic keeps the name, and that of nvidia isn't offered: give one of them another name in the "
        "configuration"
    )
    assert [(one["event"], one["source"], one["reason"]) for one in logs] == [
        ("a resource is listed twice", "nvidia", told)
    ]
    assert watched.both.hindrances() == (Hindrance("nvidia", told),)
    assert await watched.owner(GPU) == "generic"
    watched.files.lists(null="/dev/null")
    assert ids(await watched.next()) == {GPU: "a b", FILE: "/dev/null"}
    assert (watched.both.hindrances(), await watched.owner(GPU)) == ((), "nvidia")


# What people are told.


async def test_what_hinders_each_source_is_told(watched: Watched) -> None:
    silent = "it has not reported its devices yet"
    assert watched.both.hindrances() == (Hindrance("nvidia", silent), Hindrance("generic", silent))
    watched.gpus.hindered = (Hindrance("nvidia", "no name for them", held_up=True),)
    watched.files.lists(null="/dev/null")
    await watched.next()
    assert watched.both.hindrances() == watched.gpus.hindered
    assert watched.both.name == "nvidia+generic"


async def test_a_policy_is_every_ones(watched: Watched) -> None:
    watched.both.adopt(Policy(gds=True))
    assert watched.gpus.adopted == watched.files.adopted == [Policy(gds=True)]


@asynccontextmanager
async def listing_both(watched: Watched) -> AsyncIterator[Combined]:
    watched.gpus.lists(gpu="a")
    watched.files.lists(null="/dev/null")
    await watched.next()
    yield watched.both


@pytest.mark.parametrize("order", ["release", "acquire"])
@pytest.mark.parametrize(
    ("asked", "who"),
    [
        pytest.param([], ["nvidia", "generic"], id="all"),
        pytest.param(["a"], ["nvidia"], id="one's"),
        pytest.param(["a", "/dev/null"], ["nvidia", "generic"], id="both's"),
        pytest.param(["b"], [], id="nobody's"),
    ],
)
async def test_who_lets_go_of_hardware(watched: Watched, order: str, asked: list[str], who: list[str]) -> None:
    async with listing_both(watched) as both:
        found = await getattr(both, order)(asked)
    assert found == [f"{name} {order}d {' '.join(asked)}" for name in who]
