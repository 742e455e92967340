"""Runs the scenarios behind the tests: several nodes at once, because a node mostly waits for processes to start.

A test names its jobs as the parameter ``jobs`` and gets their recordings from the fixture ``recordings``. All jobs of the
selected tests run in the order of the tests, on one event loop; each test waits for its own ones. Genuine
kubelets are never skipped: where one isn't built, its tests fail (``-m "not genuine"`` leaves them out, in plain sight).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

import pytest

from gateway.lab.build import built, default
from gateway.lab.kubelet import Demand
from gateway.lab.scenarios import RESOURCE, SCENARIOS, Node, node
from gateway.lab.tap import Connection

GENUINE = default()
AT_ONCE = (os.cpu_count() or 1) + 1
WATCHING_AT_ONCE = 9
JOB_SECONDS = 180


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the kubelets that it runs against, so that ``-m "kubelet(version='1.36')"`` selects it."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        jobs = cast("tuple[Job, ...]", parameters.get("jobs", ()))
        for version in {job.version for job in jobs} | {parameters.get("version", "")} - {""}:
            item.add_marker(pytest.mark.kubelet(version=version))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the jobs of the tests that will run."""
    for item in session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            jobs = cast("tuple[Job, ...]", item.callspec.params.get("jobs", ()))
            _selected.extend(job for job in jobs if job not in _selected)


@pytest.fixture(scope="session")
def recordings() -> Iterator[Recordings]:
    """What each job recorded; raises what went wrong in it."""
    loop = asyncio.new_event_loop()
    busy, watching = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(WATCHING_AT_ONCE)

    async def run(job: Job) -> list[Connection]:
        async with watching if job.scenario == "two-gateways" else busy:
            return await job.run()

    # The loop goes on while some test waits, never beside pytest: it changes the environment between two tests, which
    # a process that is being spawned in another thread reads.
    tasks = {job: loop.create_task(run(job)) for job in _selected}
    try:
        yield lambda job: loop.run_until_complete(tasks[job])
    finally:
        for task in tasks.values():
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks.values(), return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
