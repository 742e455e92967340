"""The thread that looks at NVIDIA's GPUs: when it looks again, when NVML is closed and opened anew. Without NVML and without time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from devices.gpu.model import Way
from devices.gpu.nvidia import watch
from devices.gpu.nvidia.kernel import KernelFacts
from devices.gpu.nvidia.nvml import Board, MismatchError, NotLoadedError, Nvml, NvmlError, UnsupportedError
from devices.gpu.nvidia.scan import Busy, Let, Scan, Scanner, Seat, Session, addressed
from devices.gpu.nvidia.watch import Guests, Looker, Pace, _Command

PACE = Pace(poll=5.0, wait=0.01, again=0.5, again_max=30.0, hang=0.0)
NOTHING = Scan(0.0, (), {}, frozenset(), "", (), None)


class Stub:
    """An NVML that notes what is asked of it; one GPU, whose errors aren't told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)

    def count(self) -> int:
        return 1

    def at(self, _: int) -> str:
        return "GPU-0"

    def product(self, _: str) -> str:
        return "H100"

    def listen(self, _: str) -> None:
        raise UnsupportedError("nvmlEventSetCreate", 3)


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def looker(stub: Stub, tmp_path: Path) -> Looker:
    one = Looker(cast("Nvml", stub), KernelFacts(tmp_path, tmp_path, tmp_path), PACE, Let(), Guests())
    one._loop, one._take = cast("Any", type("Loop", (), {"call_soon_threadsafe": lambda *_: None})()), lambda _: None
    return one


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> float:
    """The thread's clock, which stands still: what is waited for is what is asked for, whatever the machine does meanwhile."""
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    return 1000.0


def error(kind: type[NvmlError]) -> NvmlError:
    return kind("nvmlInit", 1)


def seen(looker: Looker, commands: list[_Command | None]) -> list[float]:
    """Serve these commands, and return how many seconds the thread would have waited for each."""
    waited: list[float] = []
    given = iter([*commands, _Command(end=True)])

    def following(seconds: float) -> _Command | None:
        waited.append(seconds)
        return next(given)

    looker._next = following  # type: ignore[method-assign]
    looker._serve()
    return waited


def test_what_fails_is_left_alone_longer_each_time_up_to_the_most(looker: Looker) -> None:
    assert [looker._rest() for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(("age", "rest"), [(31.0, 0.5), (1.0, 2.0)], ids=["it lasted", "it is young"])
def test_a_session_that_lasted_begins_the_rests_anew(looker: Looker, age: float, rest: float) -> None:
    looker._look = lambda: NOTHING  # type: ignore[method-assign]
    looker._rest(), looker._rest()
    looker._session = Session(began=time.monotonic() - age)
    assert looker._turn() == PACE.poll
    assert looker._rest() == rest


def test_a_load_of_the_driver_is_told_once(looker: Looker) -> None:
    looker._look = lambda: NOTHING  # type: ignore[method-assign]
    looker._reloaded = 1.0
    looker._turn()
    assert looker._reloaded is None


@pytest.mark.parametrize(
    ("others", "short"),
    [
        pytest.param({}, False, id="NVML has what the driver has"),
        pytest.param({"0000:02:00.0": "GPU Excluded:\t No\n"}, True, id="the driver has one more"),
        pytest.param({"0000:02:00.0": ""}, True, id="one that says nothing"),
        pytest.param({"0000:02:00.0": "Model: \t\t H100\nGPU Excluded:\t Yes\n"}, False, id="that one is excluded"),
    ],
)
def test_where_the_driver_has_more_gpus_nvml_is_opened_again(
    stub: Stub, tmp_path: Path, others: Mapping[str, str], short: bool
) -> None:
    for pci, information in {"0000:01:00.0": "GPU Excluded:\t No\n", **others}.items():
        folder = tmp_path / "driver/nvidia/gpus" / pci
        folder.mkdir(parents=True)
        (folder / "information").write_text(information)
    node = KernelFacts(tmp_path, tmp_path, tmp_path)
    assert Scanner(cast("Nvml", stub), node, Busy())._is_short(Session(plugged=node.plugged())) is short


@pytest.mark.parametrize(
    ("kind", "hangs", "unloads"),
    [
        pytest.param(MismatchError, False, True, id="a library that doesn't fit is unloaded"),
        pytest.param(MismatchError, True, False, id="but not beneath a call that hangs"),
        pytest.param(NotLoadedError, False, False, id="another failure unloads nothing"),
    ],
)
def test_the_library_is_unloaded_only_where_another_one_is_wanted(
    looker: Looker, stub: Stub, kind: type[NvmlError], hangs: bool, unloads: bool
) -> None:
    ends = threading.Event()
    if hangs:
        looker._old = threading.Thread(target=ends.wait, daemon=True)
        looker._old.start()
    try:
        looker._down(error(kind))
    finally:
        ends.set()
    assert ("unload" in stub.calls) is unloads
    assert ("close" in stub.calls) is not hangs


@pytest.mark.parametrize("kinds", [(NotLoadedError, MismatchError), (MismatchError, NotLoadedError)])
def test_that_the_driver_was_unloaded_is_known_until_nvml_is_open(
    looker: Looker, kinds: tuple[type[NvmlError]]
) -> None:
    for kind in kinds:
        looker._down(error(kind))
    looker._closed = 7.0
    looker._open()
    assert looker._reloaded == 7.0
    looker._reloaded = None
    looker._open()
    assert looker._reloaded is None


@pytest.mark.parametrize(
    ("unseen", "free", "found"),
    [
        pytest.param([Seat(3)], ["d"], [(3, "d")], id="the address that is left is its own"),
        pytest.param([Seat(3), Seat(5)], ["d", "f"], [(3, "d"), (5, "f")], id="two, in the order of the bus"),
        pytest.param([Seat(3, pci="d"), Seat(5)], ["f"], [(3, "d"), (5, "f")], id="one told its address itself"),
        pytest.param([Seat(3)], [], [(3, "")], id="the kernel shows no addresses"),
        pytest.param([], ["d"], [(None, "d")], id="NVML doesn't count it"),
        pytest.param([Seat(3)], ["d", "f"], [(None, "d"), (None, "f")], id="NVML counts fewer: nobody knows which"),
    ],
)
def test_which_gpus_they_are_that_can_not_say_so(
    unseen: list[Seat], free: list[str], found: list[tuple[int | None, str]]
) -> None:
    assert [(one.index, one.pci) for one in addressed(unseen, free, NvmlError)] == found


def test_over_switches_two_gpus_have_as_many_links_as_the_one_with_fewer(stub: Stub, tmp_path: Path) -> None:
    scanner = Scanner(cast("Nvml", stub), KernelFacts(tmp_path, tmp_path, tmp_path), Busy())
    session = Session(boards={uuid: Board(uuid, 0, f"0000:0{place}:00.0", "H100") for place, uuid in enumerate("AB")})
    assert scanner._way(session, {"A": {"": 18}, "B": {"": 12}}, "A", "B") == (Way.NVLINK, 12)


def test_a_gpu_whose_errors_nobody_tells_counts_as_heard(looker: Looker) -> None:
    assert looker._open().heard == {"GPU-0"}


def test_nvml_is_open_without_a_released_gpu_before_anybody_is_told_of_it(stub: Stub, looker: Looker) -> None:
    """Only then is it known whether that opens the GPU all the same, and who is told of it resets the GPU."""
    before: list[str] = []
    looker._turn = lambda: 0.0  # type: ignore[method-assign]
    seen(looker, [_Command(let=Let(frozenset({"GPU-0"})), done=lambda _: before.extend(stub.calls))])
    assert before[-2:] == ["close", "open"]


@pytest.mark.parametrize(
    ("age", "waits"), [pytest.param(1.0, 0.5, id="young: not at once"), pytest.param(31.0, 0.0, id="old: at once")]
)
def test_a_wait_for_errors_that_broke(looker: Looker, still: float, age: float, waits: float) -> None:
    looker._turn = lambda: 100.0  # type: ignore[method-assign]
    stop = threading.Event()
    looker._session = Session(stop=stop, began=still - age)
    _, after = seen(looker, [_Command(broken=stop)])
    assert after == waits


def test_an_error_has_a_look_taken_soon_but_a_storm_of_them_no_more_than_two_a_second(
    looker: Looker, still: float
) -> None:
    looks: list[float] = []

    def turn() -> float:
        looks.append(still)
        return 100.0

    looker._turn = turn  # type: ignore[method-assign]
    # One look is due at once; then errors come.
    _, first, *others = seen(looker, [None, *[_Command()] * 5])
    assert len(looks) == 1
    assert (first, others) == (100.0, [0.5] * 5)
