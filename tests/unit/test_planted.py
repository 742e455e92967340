"""What stands where a file of ours should, and is none: nobody waits for it, and nobody reads it without end."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from devices.files import NotPlainError, read_plain
from gateway.bridge import memory as plugins
from gateway.cli import bundle
from gateway.configuration import choice
from gateway.configuration import file as configuration
from gateway.configuration.settings import Choice, ConfigError
from gateway.dra import cdi
from gateway.kubelet import records
from gateway.kubernetes import access
from gateway.memory import file as ledger
from gateway.memory import witness

LARGE: Final = 1 << 40
"""Bytes: more than there is memory."""


def _specify(path: Path) -> None:
    cdi.write("d", "u", {}, path.parent)


READERS: Final[dict[str, tuple[str, Callable[[Path], object]]]] = {
    "the ledger": ("ledger.json", ledger.read),
    "the bridge's memory": (plugins.NAME, lambda path: plugins.load(path.parent)),
    "the remembered label": (choice.MEMORY, lambda path: choice.remembered(Choice(path, "x/y"), path.parent)),
    "the kubelet's checkpoint": ("kubelet_internal_checkpoint", records.read_record),
    "a claim's specification": (cdi.path_of("d", "u", Path()).name, _specify),
    "the configuration": ("config.yaml", configuration.read),
    "the second file of claims": (os.fspath(witness.PATH), lambda path: witness.Witness(path.parents[1], "b")._read()),
    "a token": ("token", access._content),
    "a log": ("0.log", bundle._end),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, LARGE)


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Have a pipe written to, by one who says nothing."""
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(end)


def read_in_time(read: Callable[[Path], object], path: Path) -> None:
    """Read in a thread that the test needn't wait for; what a reader says of a file that can't be read is no matter."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            read(path)
        except (OSError, NotPlainError, ConfigError, access.AccessError):
            ended.append(None)
        except BaseException as error:  # noqa: BLE001 - the test says it
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert ended == [None]


@pytest.mark.parametrize("plant", [_pipe, _endless, _large, Path.mkdir])
@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS.keys())
def test_it_is_not_waited_for(
    tmp_path: Path, name: str, read: Callable[[Path], object], plant: Callable[[Path], None]
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    plant(tmp_path / name)
    read_in_time(read, tmp_path / name)


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS.keys())
def test_a_pipe_that_somebody_writes_to_is_not_waited_for(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    _pipe(tmp_path / name)
    with written(tmp_path / name):
        read_in_time(read, tmp_path / name)


@pytest.mark.parametrize(
    "content", [b'{"x":' + b"[" * 100_000, b'{"x":"\xff"}', b'{"generation":99999999999999999999}', b"\0"]
)
@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS.keys())
def test_what_makes_no_sense_ends_nobody(
    tmp_path: Path, name: str, read: Callable[[Path], object], content: bytes
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    read_in_time(read, tmp_path / name)


def test_a_number_that_no_gateway_wrote_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / witness.PATH
    path.parent.mkdir()
    for number, known in ((2**62 - 1, 2**62 - 1), (2**62, 0), (-1, 0)):
        path.write_text(json.dumps({"boot_id": "b", "generation": number}))
        assert witness.Witness(tmp_path, "b")._read().generation == known


def test_in_the_place_of_a_pipe_a_specification_is_put(tmp_path: Path) -> None:
    path = cdi.path_of("d", "u", tmp_path)
    _pipe(path)
    cdi.write("d", "u", {"cdiVersion": "0.5.0"}, tmp_path)
    assert json.loads(read_plain(path, 1000)) == {"cdiVersion": "0.5.0"}


def test_a_folder_among_claims_files_keeps_none_of_them(tmp_path: Path) -> None:
    stale = {f"gpu.example.com-claim-{number}.json" for number in range(16)}
    for name in stale:
        (tmp_path / name).touch()
    (planted := tmp_path / "gpu.example.com-claim-a.json").mkdir()
    (link := tmp_path / "gpu.example.com-claim-b.json").symlink_to("nowhere")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    assert set(cdi.sweep(["gpu.example.com"], [], tmp_path)) == {*stale, link.name}
    assert list(tmp_path.iterdir()) == [planted]
