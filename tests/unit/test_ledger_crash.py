"""Kill -9 at each step of a write: what is read afterwards is the old ledger or the new one, whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.memory.file import LedgerError
from gateway.memory.ledger import Ledger
from gateway.memory.rows import Cordon

ROOT = Path(__file__).parents[2]
GPU = "nvidia.com/gpu"

CHILD = """
import fcntl, json, os, signal, sys
from contextlib import suppress
from pathlib import Path
from devices.model import Device
from gateway.memory.ledger import Ledger
from gateway.memory.file import LedgerError
from gateway.memory.rows import Cordon

folder, owner, name, occurrence, when = json.loads(sys.argv[1])
module, seen = {"os": os, "fcntl": fcntl}[owner], 0
call = getattr(module, name)

def killed(*args, **kwargs):
    global seen
    seen += 1
    if seen == occurrence and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if seen == occurrence and when == "halfway":
        call(args[0], args[1][: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    result = call(*args, **kwargs)
    if seen == occurrence:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

if name == "link":  # A damaged file is put aside as early as it is loaded.
    os.link = killed
ledger = Ledger(Path(folder))
with suppress(LedgerError):
    ledger.load()
ledger.announce("nvidia.com/gpu", (Device("GPU-2"),))
ledger.cordon("GPU-2", Cordon("hums", 2.0))
setattr(module, name, killed)
snapshot = ledger.snapshot()
ledger.settle(snapshot, ledger.save(snapshot))
print("written")
"""

STEPS = [
    pytest.param("os", "open", 1, "after", "old", id="the lock is open"),
    pytest.param("fcntl", "flock", 1, "after", "old", id="the lock is taken"),
    pytest.param("os", "open", 2, "after", "old", id="the temporary file is open"),
    pytest.param("os", "write", 1, "halfway", "old", id="half of it is written"),
    pytest.param("os", "write", 1, "after", "old", id="all of it is written"),
    pytest.param("os", "fsync", 1, "after", "old", id="it is on disk"),
    pytest.param("os", "replace", 1, "before", "old", id="before the rename"),
    pytest.param("os", "replace", 1, "after", "new", id="after the rename"),
    pytest.param("os", "fsync", 2, "before", "new", id="before the folder is on disk"),
    pytest.param("os", "fsync", 2, "after", "new", id="the folder is on disk"),
    pytest.param("os", "close", 3, "after", "new", id="all is closed, the lock, too"),
]


def killed_at(folder: Path, *step: object) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([str(folder), *step])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, ""), child.stderr


def write(ledger: Ledger) -> None:
    snapshot = ledger.snapshot()
    ledger.settle(snapshot, ledger.save(snapshot))


def loaded(folder: Path) -> Ledger:
    ledger = Ledger(folder)
    ledger.load()
    return ledger


@pytest.mark.parametrize(("owner", "name", "occurrence", "when", "left"), STEPS)
def test_killed_at_a_step_of_a_write(
    tmp_path: Path, owner: str, name: str, occurrence: int, when: str, left: str
) -> None:
    before = Ledger(tmp_path)
    before.cordon("GPU-1", Cordon("smells", 1.0))
    write(before)
    killed_at(tmp_path, owner, name, occurrence, when)
    after = loaded(tmp_path)
    old, new = {"GPU-1": Cordon("smells", 1.0)}, {"GPU-2": Cordon("hums", 2.0)}
    assert after.cordons == (old if left == "old" else old | new)
    assert set(after.announced(GPU)) == (set() if left == "old" else {"GPU-2"})
    for draft in tmp_path.glob(".*.new"):  # Once it can't be another gateway's any more, it goes.
        os.utime(draft, (0, 0))
    assert loaded(tmp_path).cordons == after.cordons
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.json", "ledger.lock"}
    after.accept("v1beta1")  # The dead hold no lock.
    write(after)
    assert loaded(tmp_path).accepted == "v1beta1"


@pytest.mark.parametrize(
    ("name", "when"),
    [
        pytest.param("link", "before", id="before the damaged file is put aside"),
        pytest.param("link", "after", id="when it is put aside"),
        pytest.param("replace", "before", id="before it is replaced"),
    ],
)
def test_killed_while_a_damaged_file_is_put_aside(tmp_path: Path, name: str, when: str) -> None:
    damaged = json.dumps({"format": 2, "cordons": {"GPU-1": {"reason": "smells", "at": 1.0}}})
    (tmp_path / "ledger.json").write_text(damaged)
    killed_at(tmp_path, "os", name, 1, when)
    ledger = Ledger(tmp_path)
    with pytest.raises(LedgerError):
        ledger.load()
    assert ledger.cordons == {"GPU-1": Cordon("smells", 1.0)}
    assert (tmp_path / ledger.aside).read_text() == damaged
