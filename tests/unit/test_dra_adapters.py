"""The kubelet's APIs for DRA drivers, spelled: the genuine Go types' bytes, every field by hand, and back again."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import pluginregistration
from adapters.dialect import MalformedError
from adapters.dra import health, plugin
from adapters.dra.plugin import APIS, V1, V1BETA1, PluginApi, UnsayableShareError
from adapters.pb.dra import health_pb2, v1_pb2, v1beta1_pb2
from adapters.pb.pluginregistration import v1_pb2 as registration_pb2
from devices.claims import ClaimName, DeviceHealth, Prepared, Refused
from tests.unit import dracalls
from tests.unit.test_adapters_golden import _plain, _unknown
from tests.unit.test_adapters_wire import f

GOLDEN = sorted((Path(__file__).parents[1] / "compat" / "golden" / "dra").glob("*.json"))
MODULES = {
    "dra/v1": v1_pb2,
    "dra/v1beta1": v1beta1_pb2,
    "dra-health/v1": health_pb2,
    "dra-health/v1alpha1": health_pb2,
    "pluginregistration/v1": registration_pb2,
}
ROWS = [
    (file, api, name)
    for file in GOLDEN
    for api, found in json.loads(file.read_text()).items()
    for name in found["messages"]
]
few = settings(max_examples=30, deadline=None)


@cache
def _golden(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _whole(message: Any) -> Any:
    """Give plain values as the golden files do, where a map's values are messages."""
    plain = _plain(message)
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            plain[field.name] = {key: _plain(one) for key, one in value.items()}
    return plain


@pytest.mark.parametrize(("file", "api", "name"), ROWS, ids=[f"{file.stem} {api} {name}" for file, api, name in ROWS])
def test_a_kubelets_message_is_ours(file: Path, api: str, name: str) -> None:
    found = _golden(file)[api]
    data = bytes.fromhex(found["messages"][name])
    message = getattr(MODULES[api], name)()
    message.ParseFromString(data)
    assert _unknown(message) == 0
    assert message.SerializeToString(deterministic=True) == data
    assert _whole(message) == found["values"][name]


def test_both_genuine_versions_are_there() -> None:
    assert [file.stem for file in GOLDEN] == ["1.32", "1.37"]
    assert set(_golden(GOLDEN[1])) == set(MODULES)


DEVICE = Prepared(("r",), "p", "d", ("v/c=n", "v/c=m"))
SHARE = Prepared(("r",), "p", "d", ("v/c=n",), "s")
DEVICE_WIRE = f(1, "r") + f(2, "p") + f(3, "d") + f(4, "v/c=n") + f(4, "v/c=m")
CLAIM, CLAIM_WIRE = ClaimName("ns", "n", "u"), f(1, "ns") + f(2, "u") + f(3, "n")


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.version)
@pytest.mark.parametrize(
    ("answers", "wire"),
    [
        ({"u": (DEVICE,)}, f(1, f(1, "u") + f(2, f(1, DEVICE_WIRE)))),
        ({"u": Refused("why")}, f(1, f(1, "u") + f(2, f(2, "why")))),
        ({"u": ()}, f(1, f(1, "u") + f(2, b""))),
    ],
    ids=["prepared", "refused", "nothing"],
)
def test_a_prepare_answer(api: PluginApi, answers: Any, wire: bytes) -> None:
    assert api.encode_prepare_answer(answers) == wire
    assert dracalls.prepare_answer(api, wire) == answers


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.version)
def test_requests_and_unprepare(api: PluginApi) -> None:
    wire = f(1, CLAIM_WIRE)
    assert dracalls.request(api, [CLAIM]) == wire
    assert api.decode_prepare_request(wire) == api.decode_unprepare_request(wire) == (CLAIM,)
    answers = {"u": None, "w": Refused("why")}
    spelled = f(1, f(1, "u") + f(2, b"")) + f(1, f(1, "w") + f(2, f(1, "why")))
    assert api.encode_unprepare_answer(answers) == spelled
    assert dracalls.unprepare_answer(api, spelled) == answers


def test_a_share_is_said_by_v1_alone() -> None:
    assert dracalls.prepare_answer(V1, V1.encode_prepare_answer({"u": (SHARE,)})) == {"u": (SHARE,)}
    with pytest.raises(UnsayableShareError, match=r"cannot name the share of d\. .* 1\.34 or later"):
        V1BETA1.encode_prepare_answer({"u": (SHARE,)})


def test_services_have_the_names_that_kubelets_call() -> None:
    assert [api.service for api in APIS] == [
        "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
    ]
    assert [api.registered_as for api in APIS] == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
    assert [health.service(version) for version in health.VERSIONS] == [
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ]


@pytest.mark.parametrize(
    ("well", "word"),
    [(True, 1), (False, 2), (None, 0)],
)
def test_health(well: bool | None, word: int) -> None:
    one = DeviceHealth("p", "d", well, 7, "why")
    told = f(1, f(1, "p") + f(2, "d")) + (f(2, word) if word else b"") + f(3, 7) + f(4, 60) + f(5, "why")
    assert health.encode([one], 60) == f(1, told)
    assert dracalls.health_list(f(1, told)) == (one,)


def test_a_long_reason_is_cut_and_an_unknown_health_is_unknown() -> None:
    [one] = dracalls.health_list(health.encode([DeviceHealth("p", "d", well=False, at=1, words="x" * 5000)], 60))
    assert one.words == "x" * 1024
    assert dracalls.health_list(f(1, f(2, 9)))[0].well is None


@pytest.mark.parametrize(
    "read",
    [
        V1.decode_prepare_request,
        V1.decode_unprepare_request,
    ],
)
@pytest.mark.parametrize("data", [b"\xff", f(1, b"\xff\xff"), b"\x0a\x05ab"], ids=["tag", "inner", "cut"])
def test_what_is_no_message_is_malformed(read: Any, data: bytes) -> None:
    with pytest.raises(MalformedError):
        read(data)


def test_requests_are_bounded() -> None:
    one = f(1, f(1, "x") + f(2, "c") + f(3, "u"))
    assert len(V1.decode_prepare_request(one * plugin.MAX_CLAIMS)) == plugin.MAX_CLAIMS
    with pytest.raises(MalformedError, match=r"too many claims in a request. Allowed: 1024"):
        V1.decode_prepare_request(f(1, b"") * (plugin.MAX_CLAIMS + 1))
    with pytest.raises(MalformedError, match=rf"\({plugin.MAX_BYTES + 1} bytes\). Allowed: {plugin.MAX_BYTES}"):
        V1.decode_prepare_request(bytes(plugin.MAX_BYTES + 1))


@pytest.mark.parametrize(
    "asked",
    [
        ClaimName("ns", "c", ""),
        ClaimName("ns", "c", "a\0b"),
        ClaimName("ns", "c", "u/../../x"),
        ClaimName("ns", "c", "u" * 64),
        ClaimName("ns", "../../nodes/n1?", "u"),
        ClaimName("ns", "..", "u"),
        ClaimName("..", "c", "u"),
        ClaimName("", "c", "u"),
        ClaimName("n" * 254, "c", "u"),
    ],
)
def test_what_no_api_server_calls_a_claim_is_malformed(asked: ClaimName) -> None:
    for read in (V1.decode_prepare_request, V1.decode_unprepare_request):
        with pytest.raises(MalformedError, match="No API server makes such ones") as caught:
            read(dracalls.request(V1, [asked]))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300


def test_the_largest_request_of_a_kubelet_fits() -> None:
    asked = tuple(ClaimName("n" * 63, "c" * 253, f"{number:036}") for number in range(64))
    assert V1.decode_prepare_request(dracalls.request(V1, asked)) == asked


def test_a_long_reason_of_a_kubelet_is_cut() -> None:
    assert pluginregistration.decode_status(pluginregistration.encode_status("x" * 5000)) == "x" * 1024


text = st.text(max_size=20).filter(lambda one: one.encode(errors="replace").decode() == one)
texts = st.lists(text, max_size=3).map(tuple)
prepared = st.builds(Prepared, texts, text, text, texts, text)
answers = st.dictionaries(text, st.lists(prepared, max_size=3).map(tuple) | st.builds(Refused, text.filter(bool)))


@few
@given(answers)
def test_what_is_answered_comes_back(answers: Any) -> None:
    assert dracalls.prepare_answer(V1, V1.encode_prepare_answer(answers)) == answers
