"""Runs the scenarios behind the tests: several nodes at once, because a node mostly waits for processes to start.

A test names its jobs as the parameter ``jobs`` and gets their recordings from the fixture ``recordings``. All jobs of the
selected tests of one module run in the order of the tests, on one event loop; each test waits for its own ones. Tests that run
in several processes are dealt out by module (`make test`), so that every job runs in one of them. Genuine
kubelets are never skipped: where one isn't built, its tests fail. ``-m "not genuine"`` leaves them out, in plain sight;
``-m "not other_kubelet"``, as `make test` does, runs those on one kubelet of each dialect.
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

from gateway_lab.kubelets.build import built, default
from gateway_lab.kubelets.kubelet import Demand
from gateway_lab.matrix.run import WATCHING, WATCHING_AT_ONCE
from gateway_lab.trials.scenarios import RESOURCE, SCENARIOS, Node, node
from gateway_lab.wire.tap import Connection

GENUINE = default()
ONE_OF_EACH = "1.8", "1.9", "1.37"
"""A kubelet of each dialect: `make test` builds no others."""
AT_ONCE = (os.cpu_count() or 1) + 1
JOB_SECONDS = 180


@dataclass(frozen=True)
class Job:
    """One scenario on one node; ``tapped`` ones are recorded, with both GPUs of the node in one pod."""

    kind: Literal["emulated", "genuine"]
    scenario: str
    version: str
    tapped: bool = False
    behind: str = ""
    """The API of a plugin behind gateways that only bridge."""

    async def run(self) -> list[Connection]:
        scenario = SCENARIOS[self.scenario]
        # The kubelet chooses among free devices by chance: a recording that can be compared leaves it no choice.
        setting = node(
            _genuine if self.kind == "genuine" else _emulated,
            gpus={RESOURCE: 2} if self.tapped else scenario.gpus,
            demands=[Demand("a", RESOURCE, 2)] if self.tapped else [Demand("a", RESOURCE, 1), Demand("b", RESOURCE, 2)],
            tapped=self.tapped,
            behind=self.behind,
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
    logs = [f"gateway {number}:\n{gateway.log(100)}" for number, gateway in enumerate(made.gateways, 1)]
    return "\n".join([*logs, f"kubelet:\n{made.kubelet.log()}" if made.kubelet else "no kubelet"])


Recordings = Callable[[Job], list[Connection]]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _jobs(item: pytest.Item) -> tuple[Job, ...]:
    return cast("tuple[Job, ...]", _parameters(item).get("jobs", ()))


def _path(item: pytest.Item) -> tuple[str, ...]:
    """The kubelets that a test goes through, one after the other."""
    path = _parameters(item).get("path", ())
    return path if isinstance(path, tuple) else ()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the kubelets that it runs against, so that ``-m "kubelet(version='1.36')"`` selects it."""
    for item in items:
        versions = {job.version for job in _jobs(item)} | {_parameters(item).get("version", "")} - {""}
        for version in versions:
            item.add_marker(pytest.mark.kubelet(version=version))
        if item.get_closest_marker("genuine") and not {*versions, *_path(item)} <= {*ONE_OF_EACH}:
            item.add_marker("other_kubelet")


@pytest.fixture(scope="module")
def recordings(request: pytest.FixtureRequest) -> Iterator[Recordings]:
    """What each job recorded; raises what went wrong in it, and plays it anew for a test that runs again."""
    loop, failed = asyncio.new_event_loop(), set[Job]()
    busy, watching = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(WATCHING_AT_ONCE)

    async def run(job: Job) -> list[Connection]:
        async with watching if job.scenario in WATCHING else busy:
            return await job.run()

    # The loop goes on while some test waits, never beside pytest: it changes the environment between two tests, which
    # a process that is being spawned in another thread reads.
    jobs = dict.fromkeys(job for item in request.session.items if item.path == request.path for job in _jobs(item))
    tasks = {job: loop.create_task(run(job)) for job in jobs}

    def recorded(job: Job) -> list[Connection]:
        if job in failed:
            tasks[job] = loop.create_task(run(job))
        try:
            return loop.run_until_complete(tasks[job])
        except Exception:
            failed.add(job)
            raise

    try:
        yield recorded
    finally:
        for task in tasks.values():
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks.values(), return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
