"""What a kubelet's answers to a Register under no version tell of it, by its own words."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.registration import api as kubelet_api
from gateway.registration.api import ask

NO_SERVICE = ("UNIMPLEMENTED", "unknown service v1beta1.Registration")
SPEAKS = 'requested API version "probe" is not supported by kubelet. Supported version'


ANSWERS = {
    "1.12": ([("UNKNOWN", f'{SPEAKS} is ["v1beta1"]')], "v1beta1", "1.10 and later", True),
    "1.9": ([NO_SERVICE, ("UNKNOWN", f'{SPEAKS} is "v1alpha2"')], "v1alpha2", "1.9", True),
    "1.8": ([NO_SERVICE, ("UNKNOWN", "unsupported API version by the Kubelet registry")], "0.1", "1.8", True),
    "one of two is ours": ([("UNKNOWN", f'{SPEAKS}s are ["v2", "v1beta1"]')], "v1beta1", "1.10", True),
    "newer": ([("UNKNOWN", f'{SPEAKS}s are ["v2", "v3"]')], None, "it speaks v2, v3", True),
    "no kubelet's socket": ([NO_SERVICE, NO_SERVICE], None, "unknown", True),
    "a reason of its own": ([("UNKNOWN", "not now")], None, "unknown", True),
    "it hangs": ([("DEADLINE_EXCEEDED", "")], None, "unknown", False),
    "nobody listens": ([("UNAVAILABLE", "refused")], None, "unknown", False),
    "it dies meanwhile": ([NO_SERVICE, ("UNAVAILABLE", "")], None, "unknown", False),
}


@pytest.mark.parametrize(("answers", "api", "kubelets", "answered"), ANSWERS.values(), ids=ANSWERS)
async def test_what_its_answers_tell(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[str, str]], api: str | None, kubelets: str, answered: bool
) -> None:
    left = iter(answers)

    async def register(*_: object) -> tuple[str, str]:
        return next(left)

    monkeypatch.setattr(kubelet_api, "_register", register)
    found = await ask(Path("kubelet.sock"))
    assert (found.api, kubelets in found.kubelets, found.answered) == (api, True, answered)
    assert next(left, None) is None


async def test_one_that_hangs_is_not_waited_for_without_end(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(folder / "kubelet.sock"))
        hanging.listen()
        async with asyncio.timeout(10):
            assert not (await ask(folder / "kubelet.sock", 0.05)).answered
