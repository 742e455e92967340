"""Runs the scenarios behind the tests: several nodes at once, because a node mostly waits for processes to start.

A test names its jobs as the parameter ``jobs`` and gets their recordings from the fixture ``recordings``. All jobs of the
selected tests run in the order of the tests, on an event loop of their own; each test waits for its own ones. Genuine
kubelets are never skipped: where one isn't built, its tests fail (``-m "not genuine"`` leaves them out, in plain sight).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

import pytest

from gateway.lab.build import built
from gateway.lab.kubelet import Demand
from gateway.lab.scenarios import RESOURCE, SCENARIOS, VERSIONS, Node, node
from gateway.lab.tap import Connection

GENUINE = ("1.8", "1.9", "1.10", "1.20", "1.28", "1.37")
AT_ONCE = (os.cpu_count() or 1) + 1
WATCHING_AT_ONCE = 9
JOB_SECONDS = 90


@dataclass(frozen=True)
class Job:
    """One scenario on one node; ``tapped`` ones are recorded, with both GPUs of the node in one pod."""

    kind: Literal["emulated", "genuine"]
    scenario: str
    version: str
    tapped: bool = False

    async def run(self) -> list[Connection]:
        scenario = SCENARIOS[self.scenario]
        # The kubelet chooses among free devices by chance: a recording that can be compared leaves it no choice.
        setting = node(
            _genuine if self.kind == "genuine" else _emulated,
            versions=GENUINE if self.kind == "genuine" or self.tapped else VERSIONS,
            gpus={RESOURCE: 2} if self.tapped else scenario.gpus,
            demands=[Demand("a", RESOURCE, 2)] if self.tapped else [Demand("a", RESOURCE, 1), Demand("b", RESOURCE, 2)],
            tapped=self.tapped,
        )
        async with setting as made:
            try:
                async with asyncio.timeout(JOB_SECONDS):
                    await scenario.run(made, self.version)
                    if made.tap is None:
                        return []
                    await made.tap.wait(_all_ended)
                    return made.tap.connections
            except Exception as error:
                error.add_note(_logs(made))
                raise


def _emulated(version: str) -> Path | None:
    return None


@cache
def _genuine(version: str) -> Path:
    path = built(version)
    if path is None:
        raise AssertionError(
            f"the genuine kubelet {version} isn't built: run `make kubelets`, or leave it out: -m 'not genuine'"
        )
    return path


def _all_ended(connections: Sequence[Connection]) -> bool:
    return all(call.end is not None for connection in connections for call in connection.calls)


def _logs(made: Node) -> str:
    logs = [f"gateway {number}:\n{gateway.log()}" for number, gateway in enumerate(made.gateways, 1)]
    return "\n".join([*logs, f"kubelet:\n{made.kubelet.log()[-2000:]}" if made.kubelet else "no kubelet"])


Recordings = Callable[[Job], list[Connection]]

_selected: list[Job] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the jobs of the tests that will run."""
    for item in session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            jobs = cast("tuple[Job, ...]", item.callspec.params.get("jobs", ()))
            _selected.extend(job for job in jobs if job not in _selected)


@pytest.fixture(scope="session")
def recordings() -> Iterator[Recordings]:
    """What each job recorded; raises what went wrong in it."""
    futures: dict[Job, Future[list[Connection]]] = {job: Future() for job in _selected}

    async def run_all() -> None:
        busy, watching = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(WATCHING_AT_ONCE)

        async def run(job: Job, future: Future[list[Connection]]) -> None:
            async with watching if job.scenario == "two-gateways" else busy:
                try:
                    future.set_result(await job.run())
                except BaseException as error:
                    future.set_exception(error)
                    if isinstance(error, asyncio.CancelledError):
                        raise

        await asyncio.gather(*(run(job, future) for job, future in futures.items()))

    loop = asyncio.new_event_loop()
    all_jobs = loop.create_task(run_all())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([all_jobs])), name="scenarios")
    thread.start()
    try:
        yield lambda job: futures[job].result()
    finally:
        loop.call_soon_threadsafe(all_jobs.cancel)
        thread.join()
        loop.close()
