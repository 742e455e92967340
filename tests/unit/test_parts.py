"""Parts of a gateway, each without one: what a part needs around it is a record or a Protocol beside it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from adapters.dialect import UnsayableError
from adapters.v1beta1 import Beta
from devices.generic import GenericSource
from devices.model import Device, Field
from devices.policy import Policy
from devices.source import GiveUpError, Hindrance
from gateway import folder as folders
from gateway import following
from gateway.age import Age
from gateway.configuration.settings import Settings
from gateway.folder import Folder
from gateway.handover import leases as holding
from gateway.handover import message, records
from gateway.handover import partner as partners
from gateway.handover.events import Say
from gateway.handover.instance import Instance
from gateway.handover.leases import Leases
from gateway.handover.partner import Partner
from gateway.handover.records import RecordsSeen
from gateway.handover.standby import Standby
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.presence import Presence
from gateway.registration import events, registrar
from gateway.registration.bound import Bound
from gateway.registration.events import Phase
from gateway.registration.negotiate import NOBODY, UNFIT
from gateway.registration.serve import DevicePlugin
from gateway.registration.turns import Turns
from gateway.tally import Cause, Tally
from gateway.tasks import Background, Tasks
from gateway.telling import probes
from gateway.wires.control import ControlError
from gateway.wires.unix import listens

GPU = "example.com/gpu"
ONE, OTHER = Age(1, "one"), Age(2, "other")


def resource_in(folder: Path) -> registrar.Resource:
    node = registrar.Node(
        settings=Settings(socket_dir=folder),
        source=GenericSource(Policy()),
        tally=Tally(),
        turns=Turns(folder / "checkpoint"),
        token="0123abcd",  # noqa: S106 - its name
        kubelet_socket=folder / "kubelet.sock",
        own_socket=lambda _: folder / "own.sock",
        memory=lambda _: cast("Any", SimpleNamespace(handed_out=(), held=())),
        look_within=lambda _: None,
        accepted=lambda _: None,
        stood=lambda _: None,
        register_at=lambda: 0.0,
    )
    return registrar.Resource(node, GPU, "")


@pytest.fixture
def resource(tmp_path: Path) -> registrar.Resource:
    return resource_in(tmp_path)


@pytest.mark.parametrize(
    ("fed", "other", "phase"),
    [
        pytest.param([events.StandBy(ONE)], ONE, Phase.STANDBY, id="another gateway serves it"),
        pytest.param([events.StandBy(ONE), events.StandBy(OTHER)], OTHER, Phase.STANDBY, id="then a third one"),
        pytest.param([events.StandBy(ONE), events.Ours()], None, Phase.STANDBY, id="it is gone: made ready here"),
        pytest.param([events.StandBy(ONE), events.Ours(), events.Resume()], None, Phase.ABSENT, id="and served again"),
        pytest.param([events.StandBy(None)], None, Phase.STANDBY, id="DRA serves it: no other gateway"),
        pytest.param(
            [events.Stop(), events.StandBy(ONE)], None, Phase.STOPPED, id="after the end nobody is stood by for"
        ),
    ],
)
async def test_who_serves_a_resource_instead(
    resource: registrar.Resource, fed: list[events.Event], other: Age | None, phase: Phase
) -> None:
    for event in fed:
        resource.feed(event)
    assert (resource.standing_by_for, resource.state.phase) == (other, phase)
    await resource.close()


async def test_a_trouble_that_repeats_itself_is_said_once(resource: registrar.Resource) -> None:
    trouble, other = events.Report("error", "Register was refused", "why"), events.Report("warning", "no answer")
    with capture_logs() as said:
        for report in (trouble, trouble, other, trouble):
            resource._report(report)
    assert [one["log_level"] for one in said] == ["error", "debug", "warning", "error"]
    await resource.close()


async def test_what_is_seen_of_a_stream_that_ended_meanwhile_shows_nothing(
    resource: registrar.Resource, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends_meanwhile(*_: object) -> bool:
        resource.state = replace(resource.state, stream=2)
        return False

    monkeypatch.setattr(kubelet_view, "holds", ends_meanwhile)
    resource.state = replace(resource.state, phase=Phase.SERVING, stream=1)
    resource.plugin.list.devices = (Device("a"),)
    await resource._verify()
    assert (resource.state.phase, resource.checked) == (Phase.SERVING, None)
    await resource.close()


@pytest.mark.parametrize(
    ("listens", "own", "sayable", "says"),
    [
        pytest.param(False, True, True, (NOBODY, "nobody takes connections on"), id="no kubelet listens"),
        pytest.param(True, False, True, (NOBODY, "is gone: the folder was replaced"), id="no socket of our own"),
        pytest.param(True, True, False, (UNFIT, "cannot be said"), id="an API that can't say it"),
    ],
)
async def test_a_register_that_is_not_sent_says_why(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    listens: bool,
    own: bool,
    sayable: bool,
    says: tuple[str, str],
) -> None:
    def refuse(*_: object) -> None:
        raise UnsayableError(Field.OPTIONS, "v1beta1", "use another kubelet")

    resource = resource_in(folder)
    with contextlib.ExitStack() as sockets:
        for name in ["kubelet.sock", *(["own.sock"] if own else [])]:
            one = sockets.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(folder / name))
            if listens:
                one.listen()
        if not sayable:
            monkeypatch.setattr(Beta, "encode_register", refuse)
        code, details = await resource._register(events.SendRegister(1, "v1beta1", "1.sock"))
    assert code == says[0]
    assert says[1] in details
    await resource.close()


async def test_a_register_is_counted_with_its_own_cause(
    resource: registrar.Resource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with that of the next one, which its answer may be the cause of: here the stream has ended by then."""
    monkeypatch.setattr(resource, "_register", AsyncMock(return_value=("OK", "")))
    monkeypatch.setattr(resource.plugin, "drop_earlier_servers", AsyncMock())
    offer = events.SendRegister(1, "v1beta1", "1.sock")
    resource.state = replace(resource.state, phase=Phase.OFFERING, attempt=1, called=True)
    await resource._offer(offer)
    assert resource._node.tally.registrations == {(GPU, Cause.FIRST.value): 1}
    assert resource.state.phase is Phase.WAITING
    resource.state = replace(resource.state, phase=Phase.OFFERING, called=False)
    await resource._offer(offer)
    assert resource._node.tally.registrations[GPU, Cause.STREAM_ENDED.value] == 1
    await resource.close()


async def test_what_did_not_fit_is_offered_again_with_another_list(resource: registrar.Resource) -> None:
    resource.feed(events.Withhold("the list is too large"))
    phases = [resource.state.phase]
    resource.publish(None, ())
    assert [*phases, resource.state.phase] == [Phase.OUT, Phase.ABSENT]
    await resource.close()


@pytest.mark.parametrize(("code", "ended"), [("OK", 1), ("UNAVAILABLE", 0)])
async def test_earlier_servers_end_once_the_kubelet_knows_the_last(
    resource: registrar.Resource, monkeypatch: pytest.MonkeyPatch, code: str, ended: int
) -> None:
    monkeypatch.setattr(resource, "_register", AsyncMock(return_value=(code, "")))
    monkeypatch.setattr(resource.plugin, "drop_earlier_servers", end := AsyncMock())
    await resource._offer(events.SendRegister(1, "v1beta1", "1.sock"))
    assert end.await_count == ended
    await resource.close()


class Server:
    """A resource's server, as far as its socket goes."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()
        self._socket: socket.socket | None = None

    async def bind(self, path: Path) -> None:
        self.begun.set()
        await self.goes_on.wait()
        await self.close()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self.calls.append("bind")

    async def close(self) -> None:
        self.calls.append("close")
        if self._socket is not None:
            self._socket.close()


async def test_a_server_that_rests_listens_and_is_bound_once_when_it_is_needed(folder: Path) -> None:
    server = Server()
    bound = Bound(cast("DevicePlugin", server), lambda: folder / "s")
    await bound.wake()
    assert server.calls == []
    await bound.bind()
    await bound.rest()
    assert listens(folder / "s")
    place = bound._place
    for _ in range(2):
        await bound.wake()
    assert server.calls.count("bind") == 2
    assert listens(folder / "s")
    assert place is not None
    assert place.fileno() < 0, "it listens no more"
    await server.close()


async def test_a_server_that_is_being_bound_rests_after_that(folder: Path) -> None:
    server = Server()
    bound = Bound(cast("DevicePlugin", server), lambda: folder / "s")
    server.goes_on.clear()
    works = asyncio.gather(bound.bind(), bound.rest())
    await server.begun.wait()
    assert server.calls == []
    server.goes_on.set()
    await works
    assert server.calls[-1] == "close"
    assert listens(folder / "s")
    bound.close()


def test_a_new_kubelet_has_refused_nobody_and_shows_nothing_of_before(folder: Path) -> None:
    one = Standby(cast("Any", None), folder, folder / "pods", folder / "checkpoint")
    one.began(GPU)
    assert one._wake.is_set()
    one._taken[GPU, ONE] = 5
    since = one._since_ns
    one.kubelet_up(since - 1)
    assert (one._since_ns, one._taken) == (since, {})
    one.kubelet_up(since + 1)
    assert one._since_ns == since + 1


def test_what_is_served_here_again_is_lacking_no_more(folder: Path) -> None:
    one = Standby(cast("Any", SimpleNamespace(doubts={})), folder, folder / "pods", folder / "checkpoint")
    one._records[GPU] = RecordsSeen(lacking_since=1.0)
    assert one.lacking(GPU, 11.0) == 10.0
    assert one._wait(cast("Any", SimpleNamespace(name=GPU, state=SimpleNamespace(phase=Phase.SERVING)))) is None
    assert one.lacking(GPU, 11.0) == 0.0


@pytest.mark.parametrize("comes", [True, False], ids=["a new kubelet", "the same one"])
async def test_a_look_at_the_kubelet_before_takes_nothing_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    taken = list[object]()
    plugin = SimpleNamespace(devices=(Device("a"),))
    stands_by = SimpleNamespace(name=GPU, standing_by_for=ONE, plugin=plugin, entries={}, checked=None)
    own = SimpleNamespace(resources=[stands_by], doubts={}, unserved=taken.append)
    one = Standby(cast("Any", own), folder, folder / "pods", folder / "checkpoint")

    async def shown(*_: object) -> frozenset[str]:
        if comes:
            one.kubelet_up(0)
        return frozenset()

    monkeypatch.setattr(kubelet_view, "shown", shown)
    one._records[GPU] = RecordsSeen(lacking_since=-1e6, told=-2e6)
    await one._look()
    assert len(taken) == (0 if comes else 1)


def test_however_often_a_resource_was_taken_back_it_is_once_more() -> None:
    patience = records.LACKING * 2.0**records._MOST_TAKEN + records.LACKING_EACH
    lacking = RecordsSeen(lacking_since=0.0)
    assert [lacking.unserved(now, 1, taken=1000) for now in (patience - 0.1, patience + 0.1)] == [False, True]


class Sockets:
    """The servers of two resources that a folder binds, and what it tells them."""

    def __init__(self, folder: Path, dra: str = "off") -> None:
        self.failures, self.bound, self.told = 0, list[str](), list[tuple[str, events.Event]]()
        self.lock = asyncio.Lock()
        self.bound_anew = asyncio.Event()
        self.own = Instance(folder)
        nothing = cast("Any", lambda *_: None)
        self.folder = Folder(
            Settings(socket_dir=folder, dra=dra),
            self.own,
            Presence(folder / "kubelet.sock"),
            cast("Any", {name: self._resource(name) for name in ("a", "b")}),
            self.lock,
            kubelet_up=nothing,
            peers_changed=nothing,
            bound_anew=self.bound_anew.set,
            late=nothing,
            end=nothing,
            tasks=Tasks(nothing),
        )

    def _resource(self, name: str) -> object:
        async def bind() -> None:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("Too many open files")
            self.bound.append(name)

        return SimpleNamespace(
            bound=SimpleNamespace(bind=bind),
            feed=lambda event: self.told.append((name, event)),
            state=SimpleNamespace(name=f"{name}-1.sock"),
        )


@pytest.mark.parametrize(("dra", "bound"), [("off", ["a", "b"]), ("on", ["a", "b"]), ("only", [])])
async def test_what_is_bound_in_a_new_socket_directory(folder: Path, dra: str, bound: list[str]) -> None:
    sockets = Sockets(folder, dra)
    assert await sockets.folder._bind_anew(told=False)
    assert sockets.bound == bound
    sockets.own.remove()


@pytest.mark.parametrize("starting", [True, False])
async def test_who_is_still_starting_is_seen_by_nobody_in_a_new_socket_directory(
    folder: Path, *, starting: bool
) -> None:
    """It may wait there for as long as another gateway serves, which would stand by for it."""
    sockets, other = Sockets(folder), Instance(folder)
    sockets.own.create()
    if not starting:
        sockets.own.publish()
    assert await sockets.folder._bind_anew(told=False)
    assert (other.peers() == {}) is starting
    sockets.own.remove()


async def test_a_new_socket_directory_is_tried_again_and_never_too_seldom(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "REBIND_FIRST", 0.0001)
    monkeypatch.setattr(folders, "REBIND_MAX", 0.0002)
    sockets = Sockets(folder)
    sockets.failures = 40
    async with asyncio.timeout(20):
        await sockets.folder._rebind()
    assert sockets.bound == ["a", "b"]
    sockets.own.remove()


async def test_a_socket_directory_that_is_replaced_twice_is_bound_once_and_while_no_list_changes(folder: Path) -> None:
    sockets = Sockets(folder)
    async with sockets.lock:
        sockets.folder._replaced()
        first = sockets.folder._rebinding
        await asyncio.sleep(0)
        sockets.folder._replaced()
        for _ in range(5):
            await asyncio.sleep(0)
        assert sockets.bound == []
    await sockets.bound_anew.wait()
    assert sockets.bound == ["a", "b"]
    assert first is not None
    assert first.cancelled()
    sockets.own.remove()


async def test_every_resource_is_told_of_a_name_that_was_lost(folder: Path) -> None:
    sockets = Sockets(folder)
    sockets.folder._name_lost(name := f"{sockets.own.token}-1.sock")
    sockets.folder._name_lost("another-1.sock")
    assert sockets.told == [(one, events.NameLost(name)) for one in ("a", "b")]


async def test_the_names_that_are_looked_for_are_the_kubelets_and_our_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where inotify doesn't tell that one went, nothing else does."""
    looked_for: list[Callable[[], Iterable[str]]] = []

    class Watch:
        def __init__(self, _folder: Path, _shared: Path, names: Callable[[], Iterable[str]], **_: object) -> None:
            looked_for.append(names)

        async def run(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(folders, "FolderWatch", Watch)
    sockets = Sockets(folder)
    await sockets.folder.run()
    assert set(looked_for[0]()) == {"kubelet.sock", "a-1.sock", "b-1.sock"}


async def test_a_socket_directory_that_is_waited_for_is_told_of_once_in_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "FOLDER_AGAIN", 0.001)
    missing = folder / "missing"
    sockets, looks = Sockets(missing), list[str]()

    async def hindered() -> None:
        looks.append(sockets.folder.waits_for)
        if len(looks) == 5:
            missing.mkdir()

    with capture_logs() as said:
        await sockets.folder.wait(hindered)
    assert (len(looks), all(looks), sockets.folder.waits_for) == (5, True, "")
    assert [one["event"] for one in said] == ["waiting for the socket directory"]


async def test_a_source_that_gave_up_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = list[object](), list[int]()

    async def gives_up(source: object, _take: object) -> str:
        asked.append(source)
        raise GiveUpError("nothing is there", 78)

    monkeypatch.setattr(following, "hear", gives_up)
    monkeypatch.setattr(following, "RETRY_S", 0)
    follows = asyncio.create_task(
        following.Follower(GenericSource(Policy()), cast("Any", None), ended.append).run(asyncio.Event())
    )
    for _ in range(10):
        await asyncio.sleep(0)
    follows.cancel()
    await asyncio.gather(follows, return_exceptions=True)
    assert (len(asked), ended) == (1, [78])


async def test_a_probe_judges_what_it_is_shown(tmp_path: Path) -> None:
    judged = SimpleNamespace(
        begun=True,
        age=ONE,
        resources=[],
        presence=Presence(tmp_path / "kubelet.sock"),
        standby=SimpleNamespace(lacking=lambda *_: 0.0),
        drivers=None,
        hindrances=lambda: (Hindrance("gpus", "the driver is away"),),
        left=list,
        waits_for="",
    )
    assert "gpus: the driver is away" in probes.look(cast("Any", judged)).text


async def test_a_lease_tells_once_that_its_holder_is_gone(tmp_path: Path) -> None:
    gone: asyncio.Queue[None] = asyncio.Queue()
    tasks = Tasks(lambda _: None)
    leases, path = Leases(lambda: gone.put_nowait(None), tasks), tmp_path / "s"
    connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda _, writer: connected.put_nowait(writer), path)
    for _ in range(2):  # It is one.
        leases.hold(path)
    async with asyncio.timeout(10):
        writer = await connected.get()
        server.close()
        path.unlink()
        writer.close()
        await gone.get()
    await asyncio.sleep(0)
    assert gone.empty()
    assert connected.empty()
    await tasks.close()


@pytest.mark.parametrize("listened", [[False], [True, False]], ids=["gone", "about to go"])
async def test_a_holder_that_ends_the_connection_is_gone_once_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listened: list[bool]
) -> None:
    monkeypatch.setattr(holding, "LEASE_AGAIN", (*[0.001] * (len(listened) - 1), 3600.0))
    asked = list[bool]()
    monkeypatch.setattr(holding, "listens", lambda _: asked.pop(0))
    gone, tasks = asyncio.Event(), Tasks(lambda _: None)
    leases = Leases(gone.set, tasks)
    for _ in range(2):  # One that lives on is held again.
        asked[:] = listened
        gone.clear()
        leases.hold(tmp_path / "s")
        async with asyncio.timeout(10):
            await gone.wait()
        assert not asked
    await tasks.close()


def test_no_message_names_more_resources_than_the_other_one_takes() -> None:
    connection = Mock()
    partner = Partner(ONE, connection)
    for number in range(message.IN_ONE_MESSAGE + 1):
        partner.say(Say.ASK, str(number))
    assert [len(resources) for _, resources, _ in partner.outbox] == [message.IN_ONE_MESSAGE, 1]
    partner.say(Say.GOING, "0")
    assert [say for say, *_ in partner.outbox] == [Say.ASK, Say.ASK, Say.GOING]
    connection.abort.assert_not_called()


async def test_an_ask_that_is_written_late_waits_no_longer_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stood still meanwhile: the newer one goes on when its own wait is over, and no stream may end after that."""
    sent = list[dict[str, Any]]()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        raise ControlError("it is gone")

    partner = Partner(ONE, cast("Any", SimpleNamespace(send=send, abort=Mock())))
    clock = iter((1000, 10**12))
    monkeypatch.setattr(partners, "boot_ns", lambda: next(clock))
    partner.say(Say.ASK, "a")
    await partner.write(ONE)
    assert [one["until_ns"] for one in sent] == [1000 + message.ASK_TIME * 1e9]


async def test_a_part_that_must_not_end_ends_the_gateway() -> None:
    ended: asyncio.Queue[int] = asyncio.Queue()
    tasks = Tasks(ended.put_nowait)
    tasks.spawn("part", asyncio.sleep(0))
    async with asyncio.timeout(10):
        assert await ended.get() == 1
    await tasks.close()


async def test_a_task_that_fails_and_that_nobody_waits_for_is_told_of_at_once() -> None:
    log, told = Mock(), asyncio.Event()

    async def refused() -> None:
        raise PermissionError

    log.error.side_effect = lambda *_, **__: told.set()
    tasks = Background(log)
    tasks.background(refused())
    async with asyncio.timeout(10):
        await told.wait()
    log.error.assert_called_once()
    await tasks.close()


async def test_what_only_one_of_a_pair_does_waits_for_its_turn() -> None:
    turn, began = asyncio.Event(), asyncio.Event()

    async def active() -> None:
        await turn.wait()

    async def work() -> None:
        began.set()
        await asyncio.get_running_loop().create_future()

    tasks = Tasks(lambda _: None, active)
    tasks.spawn_once_active("work", work())
    await asyncio.sleep(0)
    assert not began.is_set()
    turn.set()
    async with asyncio.timeout(10):
        await began.wait()
    await tasks.close()
