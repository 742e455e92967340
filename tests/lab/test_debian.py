"""This machine's mirrors of Debian, for another release of it."""

from __future__ import annotations

import pytest

from gateway_lab import debian
from tools.image.contents import ImageError
from tools.image.debian import sources

HERE = """\
http://mirror.example/debian/ bookworm Debian main
http://mirror.example/debian/ bookworm-updates Debian main
http://mirror.example/debian-security/ bookworm-security Debian main
"""
WANTED = (
    ("http://mirror.example/debian-security/", "trixie-security"),
    ("http://mirror.example/debian/", "trixie"),
    ("http://mirror.example/debian/", "trixie-updates"),
)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        pytest.param("", WANTED, id="Debian"),
        pytest.param(HERE, WANTED, id="each but once"),
        pytest.param("http://mirror.example/debian/ sid Debian main\n", WANTED, id="two releases"),
        pytest.param("http://mirror.example/debian/ bookworm-backports Debian main\n", WANTED, id="backports"),
        pytest.param("http://mirror.example/debian/ bookworm Debian non-free\n", WANTED, id="another component"),
        pytest.param("https://other.example/apt bookworm Other main\n", WANTED, id="another vendor"),
        pytest.param("https://other.example/apt x\n", WANTED, id="a flat repository"),
        pytest.param(
            "http://near.example/debian/ bookworm Debian main\n",
            (WANTED[0], *WANTED[1:], ("http://near.example/debian/", "trixie")),
            id="a second mirror",
        ),
    ],
)
def test_the_machines_mirrors_of_debian_serve_the_wanted_release(
    more: str, wanted: tuple[tuple[str, str], ...]
) -> None:
    assert debian.served("trixie", HERE + more) == wanted


def test_a_machine_of_another_vendor_has_none() -> None:
    assert debian.served("trixie", "http://mirror.example/ubuntu/ noble Ubuntu main\n") == ()


@pytest.mark.parametrize("mirrors", [(), WANTED[1:]])
def test_an_image_without_security_updates_is_not_made(mirrors: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ImageError, match="expected apt sources of a Debian with its security updates"):
        sources(mirrors)
