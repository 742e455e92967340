"""The checks of ``gateway doctor``, and their results for a snapshot. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec.yaml
from msgspec import Struct

from gateway.doctor import claims, cluster, drivers, gateways, kubelets, runtimes
from gateway.doctor.snapshot import NodeFacts

PAGES: Final = "docs/"
Outcome = Literal["ok", "unseen", "warning", "error"]
JUDGES: Final[Mapping[str, Callable[[NodeFacts], str]]] = {
    **kubelets.CHECKS,
    **gateways.CHECKS,
    **drivers.CHECKS,
    **runtimes.CHECKS,
    **cluster.CHECKS,
    **claims.CHECKS,
}
"""The checks by code. Each returns the fault; '' if there is none, or if it can't be seen from here."""


class Check(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of checks.yaml. ``title`` is its text if it passes, ``fault`` if it fails. ``needs`` is the part of the snapshot that it reads."""

    code: str
    level: Literal["warning", "error"]
    title: str
    fault: str
    means: str
    do: str
    page: str
    needs: str = ""


class Category(Struct, frozen=True, forbid_unknown_fields=True):
    """Checks under one heading."""

    category: str
    checks: tuple[Check, ...]


class CheckResult(Struct, frozen=True, omit_defaults=True):
    """The result of one check. If the check passed or could not be made, ``seen`` and the fields after it are empty."""

    code: str
    category: str
    outcome: Outcome
    title: str
    seen: str = ""
    means: str = ""
    do: str = ""
    page: str = ""


@functools.cache
def categories() -> tuple[Category, ...]:
    """Read the checks that come with the gateway."""
    return msgspec.yaml.decode((Path(__file__).parent / "checks.yaml").read_bytes(), type=tuple[Category, ...])


def judged(snapshot: NodeFacts, ignored: Iterable[str] = ()) -> Iterator[CheckResult]:
    """Return the result of every check that isn't ignored, in the order of the file."""
    left_out = set(ignored)
    for category in categories():
        for check in category.checks:
            if check.code in left_out:
                continue
            seen = JUDGES[check.code](snapshot)
            said: dict[str, Any] = {"code": check.code, "category": category.category}
            said["title"] = check.fault if seen else check.title
            if seen:
                page = f"{PAGES}{check.page}"
                yield CheckResult(**said, outcome=check.level, seen=seen, means=check.means, do=check.do, page=page)
            elif check.needs and getattr(snapshot, check.needs) in (None, (), {}):
                yield CheckResult(**said, outcome="unseen")
            else:
                yield CheckResult(**said, outcome="ok")
