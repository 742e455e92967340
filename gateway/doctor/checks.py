"""The checks of ``gateway doctor``: what each is called, and what it makes of a snapshot. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec.yaml
from msgspec import Struct

from gateway.doctor import claims, cluster, drivers, gateways, kubelets, runtimes
from gateway.doctor.snapshot import Surveyed

PAGES: Final = "docs/"
Outcome = Literal["ok", "unseen", "warning", "error"]
JUDGES: Final[Mapping[str, Callable[[Surveyed], str]]] = {
    **kubelets.CHECKS,
    **gateways.CHECKS,
    **drivers.CHECKS,
    **runtimes.CHECKS,
    **cluster.CHECKS,
    **claims.CHECKS,
}
"""Each says what it saw that is wrong; nothing where nothing is, or where it can't be seen from here."""


class Check(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of checks.yaml. ``title`` says what is well, ``fault`` what is not."""

    code: str
    level: Literal["warning", "error"]
    title: str
    fault: str
    means: str
    do: str
    page: str
    needs: str = ""


class Category(Struct, frozen=True, forbid_unknown_fields=True):
    """Checks that stand under one heading."""

    category: str
    checks: tuple[Check, ...]


class CheckResult(Struct, frozen=True, omit_defaults=True):
    """What became of one check. ``seen`` and what follows are empty where nothing was found, or what it needs can't be seen."""

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


def judged(snapshot: Surveyed, ignored: Iterable[str] = ()) -> Iterator[CheckResult]:
    """Judge a snapshot by every check that isn't ignored, in the order of the file."""
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
