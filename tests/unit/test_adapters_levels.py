"""Evidence on a connection -> the kubelets that fit it: a row for each kind of evidence and each contradiction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialect import Level, left_out, span
from adapters.levels import GRPC_GO, Evidence, by_user_agent, level, may_be_kubelet, minor_version
from adapters.registry import DIALECTS, by_name
from devices.model import Field

UNKNOWN = Level(10)


@pytest.mark.parametrize(
    ("user_agent", "expected"),
    [
        pytest.param("grpc-go/1.3.0", True, id="1.8"),
        pytest.param("grpc-go/1.82.1", True, id="1.37"),
        pytest.param("grpc-go/2.0.0-dev", True, id="a later one"),
        pytest.param("exporter/1.0 grpc-go/1.60.0", False, id="a program of another name"),
        pytest.param("grpc-python-asyncio/1.85.1 grpc-c/58.0.0 (linux; chttp2)", False, id="Python"),
        pytest.param("", False, id="nothing"),
        pytest.param(None, False, id="not said"),
    ],
)
def test_who_may_be_a_kubelet(user_agent: str | None, expected: bool) -> None:
    assert may_be_kubelet(user_agent) is expected


@pytest.mark.parametrize(
    ("user_agent", "expected"),
    [
        # As released.
        ("grpc-go/1.7.5", Level(10, 12)),
        ("grpc-go/1.13.0", Level(13, 15)),
        ("grpc-go/1.23.1", Level(17, 17)),
        ("grpc-go/1.27.1", Level(20, 21)),
        ("grpc-go/1.47.0", Level(25, 25)),
        ("grpc-go/1.49.0", Level(26, 26)),
        ("grpc-go/1.54.0", Level(26, 28)),
        ("grpc-go/1.56.3", Level(26, 28)),
        ("grpc-go/1.58.3", Level(29, 30)),
        ("grpc-go/1.65.0", Level(31, 32)),
        ("grpc-go/1.79.3", Level(36, 36)),
        # The newest, and what comes after it.
        ("grpc-go/1.82.1", Level(37)),
        ("grpc-go/1.99.0", Level(37)),
        ("grpc-go/2.0.0", Level(37)),
        # Older than all, and between two: a release that nobody looked at.
        ("grpc-go/1.3.0", Level(10, 12)),
        ("grpc-go/1.57.0", Level(26, 30)),
        ("grpc-go/1.60.0", Level(29, 32)),
        # Said in other ways.
        ("kubelet/v1.30.0 grpc-go/1.58.3", Level(29, 30)),
        ("grpc-go/1.58.3-dev", Level(29, 30)),
        # No kubelet's.
        ("grpc-python/1.85.1 grpc-c/52.0.0 (linux; chttp2)", UNKNOWN),
        ("not-grpc-go/1.58.3", UNKNOWN),
        ("grpc-go/1.58", UNKNOWN),
        ("grpc-go/99999.0.0", UNKNOWN),
        ("grpc-go/", UNKNOWN),
        ("", UNKNOWN),
        ("x" * 300 + " grpc-go/1.58.3", UNKNOWN),
    ],
)
def test_user_agent(user_agent: str, expected: Level) -> None:
    assert level(by_name("v1beta1"), Evidence(user_agent)) == expected


@pytest.mark.parametrize(
    ("dialect", "evidence", "expected"),
    [
        ("v1beta1", Evidence(), UNKNOWN),
        ("v1beta1", Evidence(options_called_before_list=True), Level(25)),
        ("v1beta1", Evidence(options_called_before_list=False), Level(10, 24)),
        # Together they tell more.
        ("v1beta1", Evidence("grpc-go/1.65.0", options_called_before_list=True), Level(31, 32)),
        ("v1beta1", Evidence("grpc-go/1.40.0", options_called_before_list=False), Level(23, 24)),
        ("v1beta1", Evidence("grpc-go/1.26.0", options_called_before_list=False), Level(18, 18)),
        ("v1beta1", Evidence("python", options_called_before_list=True), Level(25)),
        # They contradict each other: the older one.
        ("v1beta1", Evidence("grpc-go/1.65.0", options_called_before_list=False), Level(10, 24)),
        ("v1beta1", Evidence("grpc-go/1.40.0", options_called_before_list=True), Level(23, 24)),
        # The operator settles it.
        ("v1beta1", Evidence("grpc-go/1.40.0", options_called_before_list=False, pinned=30), Level(30, 30)),
        ("v1beta1", Evidence(pinned=38), Level(38, 38)),
        # A dialect that was accepted bounds everything else.
        ("v1beta1", Evidence(pinned=9), Level(10, 10)),
        ("v1beta1", Evidence(pinned=0), Level(10, 10)),
        ("v1alpha2", Evidence(), Level(9, 9)),
        ("v1alpha2", Evidence("grpc-go/1.3.0", options_called_before_list=False), Level(9, 9)),
        ("0.1", Evidence(pinned=30), Level(8, 8)),
    ],
)
def test_evidence(dialect: str, evidence: Evidence, expected: Level) -> None:
    assert level(by_name(dialect), evidence) == expected


@pytest.mark.parametrize(
    ("dialect", "field", "at", "lost"),
    [
        ("v1beta1", Field.TOPOLOGY, Level(10, 12), False),  # It is spelled, and not heeded.
        ("v1beta1", Field.PREFERRED_ALLOCATION, None, False),
        ("v1alpha2", Field.TOPOLOGY, None, True),
        ("v1alpha2", Field.ANNOTATIONS, Level(9, 9), True),
    ],
)
def test_what_came_later_is_always_spelled(dialect: str, field: Field, at: Level | None, *, lost: bool) -> None:
    assert left_out(by_name(dialect), (field,), at) == ({field} if lost else set())


@pytest.mark.parametrize("minor", GRPC_GO)
def test_a_released_kubelet_fits_its_own_grpc_go(minor: int) -> None:
    for version in GRPC_GO[minor]:
        found = by_user_agent("grpc-go/" + ".".join(map(str, version)))
        assert found.reaches(minor) is not False
        assert found.reaches(minor + 1) is not True


def test_grpc_go_only_rises() -> None:
    for ends in zip(*GRPC_GO.values(), strict=True):
        assert list(ends) == sorted(ends)


evidence = st.builds(
    Evidence,
    st.none() | st.text(max_size=40) | st.from_regex(r"grpc-go/\d{1,5}\.\d{1,3}\.\d{1,3}", fullmatch=True),
    st.none() | st.booleans(),
    st.none() | st.integers(-5, 1000),
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(evidence=evidence)
def test_no_evidence_is_an_error_or_leaves_the_dialect(dialect: object, evidence: Evidence) -> None:
    dialect = by_name(getattr(dialect, "name", ""))
    found = level(dialect, evidence)
    assert found.low >= dialect.kubelets.low
    assert found.high is None or found.high >= found.low
    if dialect.kubelets.high is not None:
        assert found == dialect.kubelets


@pytest.mark.parametrize(
    ("text", "minor"),
    [
        ("1.8", 8),
        ("1.28", 28),
        ("v1.28.15", 28),
        ("1.28.15", 28),
        ("v1.29.0-rc.1", 29),
        ("v1.30.4+k3s1", 30),
        ("v1.27.16-gke.1296000", 27),
    ],
)
def test_version(text: str, minor: int) -> None:
    assert minor_version(text) == minor


@pytest.mark.parametrize("text", ["", "1", "28", "2.0", "1.", "1.x", "v1.28 ", "1.2800", "latest", "1.28." + "0" * 99])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a kubelet version such as"):
        minor_version(text)


@pytest.mark.parametrize(
    ("level", "minor", "reached"),
    [
        (Level(29), 29, True),
        (Level(10, 28), 29, False),
        (Level(28, 29), 29, None),
        (Level(10), 29, None),
        (Level(30, 30), 29, True),
    ],
)
def test_reaches(level: Level, minor: int, reached: bool | None) -> None:
    assert level.reaches(minor) is reached


@pytest.mark.parametrize(
    ("level", "words"), [(Level(8, 8), "1.8"), (Level(26, 28), "1.26 to 1.28"), (Level(10), "1.10 and later")]
)
def test_span(level: Level, words: str) -> None:
    assert span(level) == words
