"""A gateway's place on the node: who is there, and what may be removed."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.leader import instance as instances
from gateway.leader.instance import FOLDER, Instance, alive, make_folder, sweep
from gateway.leader.locks import Locks


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Instance]]:
    """Instances that are removed whatever happens."""
    instances: list[Instance] = []
    yield instances
    for instance in instances:
        instance.remove()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("there", "", id="there"),
        pytest.param("device-plugins", "", id="a kubelet's, before its first start"),
        pytest.param("device-plugin", "there is no folder {0}/device-plugin, the nearest one is {0}: correct", id="a slip"),
        pytest.param("a/b/device-plugins", "the nearest one is {0}: correct --socket-dir", id="a slip above it"),
        pytest.param("file", "{0}/file isn't a folder: correct --socket-dir", id="a file"),
        pytest.param("link", "{0}/link isn't a folder: correct --socket-dir", id="a link to nowhere"),
    ],
)  # fmt: skip
def test_the_socket_directory_is_made_only_where_a_kubelet_would(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    said = make_folder(tmp_path / name)
    assert (words.format(tmp_path) in said, bool(said)) == (True, bool(words))
    assert (tmp_path / name).is_dir() is not bool(words)
    assert not (tmp_path / "a").exists()


def living(tmp_path: Path, made: list[Instance]) -> Instance:
    instance = Instance(tmp_path)
    made.append(instance)
    instance.create()
    return instance


@pytest.mark.parametrize("opens", ["os.scandir", "os.open"])
def test_without_a_descriptor_it_is_not_known_who_lives(
    tmp_path: Path, made: list[Instance], monkeypatch: pytest.MonkeyPatch, opens: str
) -> None:
    """Other threads take descriptors, too, in between."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    living(tmp_path, made)
    with monkeypatch.context() as limited:
        limited.setattr(opens, refuse)
        with pytest.raises(OSError, match="Too many open files"):
            alive(tmp_path)


def test_so_many_folders_are_looked_at_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_MAX_PEERS", 2)
    for number in range(3):
        (tmp_path / FOLDER / f"0000000{number}").mkdir(parents=True)
    assert [len(sweep(tmp_path)) for _ in range(3)] == [2, 1, 0]


def test_what_is_planted_beside_them_hides_no_gateway(
    tmp_path: Path, made: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_MAX_PEERS", 2)
    first, second = living(tmp_path, made), living(tmp_path, made)
    for number in range(3):
        (tmp_path / FOLDER / f"0000000{number}").touch()
        (tmp_path / FOLDER / f".planted{number}").mkdir()
    assert alive(tmp_path) == {first.token, second.token}


@pytest.mark.parametrize(("seconds", "swept"), [(0, []), (60, [".0123abcd"])], ids=["just begun", "long ago"])
def test_a_folder_in_the_making_has_no_lock_yet(tmp_path: Path, seconds: float, swept: list[str]) -> None:
    folder = tmp_path / FOLDER / ".0123abcd"
    folder.mkdir(parents=True)
    os.utime(folder, (time.time() - seconds,) * 2)
    assert sweep(tmp_path) == swept


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_that_is_no_file_is_nobodys(tmp_path: Path, kind: str) -> None:
    folder, target = tmp_path / FOLDER / "deadbeef", tmp_path / "target"
    folder.mkdir(parents=True)
    with target.open("w") as somebodys:
        fcntl.flock(somebodys, fcntl.LOCK_EX)
        if kind == "pipe":
            os.mkfifo(folder / "lock")
        else:
            (folder / "lock").symlink_to(target)
        assert sweep(tmp_path) == ["deadbeef"]
    assert target.exists()


@pytest.mark.parametrize("name", ["..", "lock", "deadbeef.txt", "DEADBEEF", "nvidia"])
def test_a_folder_that_is_none_of_ours_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / FOLDER / name).mkdir(parents=True, exist_ok=True)
    assert sweep(tmp_path) == []


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "lock").touch()
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "deadbeef").symlink_to(victim)
    assert sweep(tmp_path) == []
    assert (victim / "lock").exists()


# How old the gateways of a pod are.

HOUR_NS = 3600 * 10**9


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The boot clock, which goes on by a second with each look."""
    clock = [HOUR_NS]

    def now() -> int:
        clock[0] += 10**9
        return clock[0]

    monkeypatch.setattr(instances, "boot_ns", now)
    return clock


def born(tmp_path: Path, pod: str) -> int:
    """Return when a gateway was born that starts now, and ends."""
    one = Instance(tmp_path, pod_uid=pod)
    one.create()
    one.remove()
    return one.age.born_ns


def _linked(path: Path) -> None:
    path.symlink_to(path.with_name("target"))
    path.with_name("target").touch()


@pytest.mark.parametrize(
    ("spoil", "replaced"),
    [
        pytest.param(lambda path: path.write_text(f"{2 * HOUR_NS}\n"), True, id="of an earlier boot"),
        pytest.param(lambda path: path.write_text(""), True, id="empty"),
        pytest.param(lambda path: path.write_text("5"), True, id="cut off"),
        pytest.param(lambda path: path.write_text("-5\n"), True, id="below zero"),
        pytest.param(_linked, True, id="a link"),
        pytest.param(lambda path: path.symlink_to("nowhere"), True, id="a link to nowhere"),
        pytest.param(os.mkfifo, True, id="a pipe"),
        pytest.param(Path.mkdir, False, id="a directory"),
    ],
)
def test_what_says_no_age_does_not_count(
    tmp_path: Path, boot: list[int], spoil: Callable[[Path], object], replaced: bool
) -> None:
    path = tmp_path / FOLDER / "pod-a"
    path.parent.mkdir()
    spoil(path)
    began = boot[0]
    first, again = born(tmp_path, "a"), born(tmp_path, "a")
    assert began < first <= again
    assert (first == again, path.is_file()) == (replaced, replaced)
    assert not path.is_symlink()
    assert {one.read_bytes() for one in path.parent.glob("target")} <= {b""}


@pytest.mark.usefixtures("boot")
def test_the_pods_that_came_last_are_remembered(tmp_path: Path) -> None:
    pods = [f"{number:02}" for number in range(20)]
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "pod-planted").mkdir()
    for pod in pods:
        born(tmp_path, pod)
    there = {path.name for path in (tmp_path / FOLDER).iterdir() if path.is_file()}
    assert there == {f"pod-{pod}" for pod in pods[-16:]}


def test_a_write_ends_where_the_locks_were_freed_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir()
    locks = Locks(tmp_path / "sockets", tmp_path / "state", "token")
    locks.open()
    assert locks.take()
    with locks.writing() as check:
        check()
        locks.free()  # Another gateway may lead from here on.
        with pytest.raises(OSError, match="another gateway may lead by now"):
            check()
    locks.close(last=True)
