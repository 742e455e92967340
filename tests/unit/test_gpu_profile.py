"""Profiles: what a person may write, and what they are told when it is wrong."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from devices.gpu.model import GPU, Link, Way
from devices.gpu.simulated import profile
from devices.gpu.simulated.document import ProfileError
from devices.gpu.simulated.profile import Described, find, parse, read, shipped
from devices.model import Health, Trouble, TroubleKind

ALL_OF_64 = f"{{between: {list(range(64))}, by: pix}}"


def described(beneath: str) -> Described:
    """Parse one resource, given what stands beneath its name, unindented."""
    indented = "".join(f"    {line}\n" for line in beneath.splitlines())
    return parse(f"resources:\n  nvidia.com/gpu:\n{indented}".encode(), "p.yaml")["nvidia.com/gpu"]


def gpus(beneath: str) -> tuple[GPU, ...]:
    return described(beneath).gpus


def error(text: str | bytes) -> str:
    with pytest.raises(ProfileError) as wrong:
        parse(text if isinstance(text, bytes) else text.encode(), "p.yaml")
    return str(wrong.value)


@pytest.mark.parametrize(
    ("beneath", "seen"),
    [
        ("gpus: 2", [("Simulated GPU", 80), ("Simulated GPU", 80)]),
        ("gpus: 1\nproduct: NVIDIA L4\nmemory: 24", [("NVIDIA L4", 24)]),
        (
            "gpus: 1\nmig: {0: [2g.20gb, 1c.3g.40gb]}",
            [("Simulated GPU", 80), ("Simulated GPU", 20), ("Simulated GPU", 40)],
        ),
        ("gpus: 4\npartitions: 2", [("Simulated GPU", 40)] * 4),
    ],
)
def test_claims_can_choose_by_product_and_memory(beneath: str, seen: list[tuple[str, int]]) -> None:
    assert [(gpu.product, gpu.memory / 1024**3) for gpu in gpus(beneath)] == seen


@pytest.mark.parametrize(
    ("beneath", "seen"),
    [
        ("gpus: 2", [(None, "", ()), (None, "", ())]),
        ("gpus: 0", []),
        ("gpus: []", []),
        ("gpus: 3\nnuma: [0, null, 1]", [(0, "", ()), (None, "", ()), (1, "", ())]),
        ("gpus: 2\nnuma:\nunhealthy:", [(None, "", ()), (None, "", ())]),
        ("gpus: 2\nunhealthy: {1: fell off the bus}", [(None, "", ()), (None, "fell off the bus", ())]),
        ("gpus: 2\nunhealthy: {0: 'no'}", [(None, "no", ()), (None, "", ())]),
        ("gpus: [{uuid: a}, {uuid: b}]\nunhealthy: {b: hot}", [(None, "", ()), (None, "hot", ())]),
        ("gpus: [{uuid: '1'}, {}]\nunhealthy: {'1': hot}", [(None, "hot", ()), (None, "", ())]),
        ("gpus:\n- {numa: 1, health: Unhealthy, reason: hot}", [(1, "hot", ())]),
        ("gpus:\n- health: Unhealthy", [(None, "unhealthy in the profile", ())]),
        ("gpus: [{health: Unhealthy, reason: hot}]\nunhealthy: {0: cold}", [(None, "cold", ())]),
        ("gpus: [{device_nodes: [/dev/null, /dev/dri/card0]}]", [(None, "", ("/dev/null", "/dev/dri/card0"))]),
    ],
)
def test_what_may_be_written(beneath: str, seen: list[tuple[int | None, str, tuple[str, ...]]]) -> None:
    found = gpus(beneath)
    assert [(gpu.numa_node, gpu.trouble.reason if gpu.trouble else "", gpu.device_nodes) for gpu in found] == seen
    assert [gpu.health is Health.UNHEALTHY for gpu in found] == [bool(reason) for _, reason, _ in seen]
    assert [gpu.index for gpu in found] == [gpu.minor for gpu in found] == list(range(len(seen)))


@pytest.mark.parametrize(
    ("beneath", "trouble"),
    [
        ("hot", Trouble("hot", TroubleKind.RESTART_APP)),
        ("{reason: hot}", Trouble("hot", TroubleKind.RESTART_APP)),
        *((f"{{reason: hot, kind: {kind.value}}}", Trouble("hot", kind)) for kind in TroubleKind),
    ],
)
def test_a_trouble_has_a_kind(beneath: str, trouble: Trouble) -> None:
    assert [gpu.trouble for gpu in gpus(f"gpus: 2\nunhealthy: {{1: {beneath}}}")] == [None, trouble]


@pytest.mark.parametrize(
    ("beneath", "left", "named"),
    [
        ("recovered: [1]", "abc", Described((), recovered=frozenset("b"))),
        ("released: [0, c]", "abc", Described((), released=frozenset("ac"))),
        ("withdrawn: [1, b]", "ac", Described((), withdrawn=frozenset("b"))),
        ("recovered:\nreleased:\nwithdrawn:", "abc", Described(())),
        ("withdrawn: [0, 1, 2]\nunhealthy: {1: hot}", "", Described((), withdrawn=frozenset("abc"))),
    ],
)
def test_gpus_are_named_by_index_or_uuid(beneath: str, left: str, named: Described) -> None:
    found = described(f"gpus: [{{uuid: a}}, {{uuid: b}}, {{uuid: c}}]\n{beneath}")
    assert [gpu.uuid for gpu in found.gpus] == list(left)
    assert [gpu.index for gpu in found.gpus] == ["abc".index(uuid) for uuid in left]
    assert replace(found, gpus=()) == named


def test_what_holds_for_all_gpus_of_a_resource() -> None:
    plain, named = gpus("gpus: [{uuid: a}]"), gpus("gpus: [{uuid: a}]\ncdi: vendor.com/gpu\npre_start: true")
    assert [(gpu.cdi_name, gpu.pre_start) for gpu in plain] == [("", False)]
    assert [(gpu.cdi_name, gpu.pre_start) for gpu in named] == [("vendor.com/gpu=a", True)]


@pytest.mark.parametrize(
    ("beneath", "links"),
    [
        ("links:", ["", "", "", ""]),
        ("links: [{between: [0, 1], by: pix}]", ["pix b", "pix a", "", ""]),
        ("links: [{between: [d, 1], by: xgmi, lanes: 3}]", ["", "xgmi d 3", "", "xgmi b 3"]),
        ("links: [{between: [0, 1, 2], by: sys}]", ["sys b, sys c", "sys a, sys c", "sys a, sys b", ""]),
        (
            "links: [{between: [0, 1], by: phb}, {between: [1, 0], by: node}]",
            ["phb b, node b", "phb a, node a", "", ""],
        ),
        ("withdrawn: [1]\nlinks: [{between: [0, 1], by: pxb}]", ["pxb b", "", ""]),
    ],
)
def test_links(beneath: str, links: list[str]) -> None:
    def shown(link: Link) -> str:
        return f"{link.way.value} {link.peer}" + (f" {link.lanes}" if link.lanes > 1 else "")

    found = gpus(f"gpus: [{{uuid: a}}, {{uuid: b}}, {{uuid: c}}, {{uuid: d}}]\n{beneath}")
    assert [", ".join(map(shown, gpu.links)) for gpu in found] == links
    assert {gpu.parent for gpu in found} == {""}


def test_partitions_in_a_row_are_of_one_gpu_whose_links_they_have() -> None:
    found = gpus("gpus: 5\npartitions: 2\nlinks: [{between: [1, 4], by: nvlink}]")
    first, second, third = (gpu.parent for gpu in found[::2])
    assert [gpu.board for gpu in found] == [first, first, second, second, third]
    assert len({first, second, third, *(gpu.uuid for gpu in found)}) == 8
    there, back = (Link(third, Way.NVLINK),), (Link(first, Way.NVLINK),)
    assert [gpu.links for gpu in found] == [there, there, (), (), back]
    assert [gpu.uuid for gpu in found] == [gpu.uuid for gpu in gpus("gpus: 5")]


@pytest.mark.parametrize(
    "text",
    [
        "secret",
        "- secret",
        "secret: secret",
        "!secret x",
        "secret: 1\nsecret: 2",
        "root:*:secret:\nx:secret",
        "5: secret",
    ],
)
def test_of_a_file_that_is_no_profile_nothing_is_said_again(text: str) -> None:
    assert "secret" not in error(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "line 1: expected a profile, got an empty file: write 'resources:' and beneath it resource names, such as",
        ),
        ("# nothing\n", "line 1: expected a profile, got an empty file: "),
        ("8", "line 1: the profile: expected a mapping, got something else: write 'resources:'"),
        (
            "gpus: 8",
            "line 1: the profile: expected the key 'resources', got none: write 'resources:' and beneath it resource names",
        ),
        ("{}", "line 1: the profile: expected the key 'resources', got none: write 'resources:'"),
        (
            "resources:\n",
            "line 1: resources: expected a mapping, got nothing: write resource names, and",
        ),
        ("resources:\n  gpu: {gpus: 1}", "line 2: resources.gpu: expected a resource name with a domain, such as"),
        (
            "resources: {3: 4}",
            "line 1: resources: expected keys that are text, got a whole number: write resource names",
        ),
        ("resources:\n  a/b:", "line 2: resources['a/b']: expected a mapping, got nothing: write resource names"),
        ("resources:\n  a/b: {}", "line 2: resources['a/b']: expected the key 'gpus', got none: write resource names"),
        ("resources:\n  a/b: 8", "line 2: resources['a/b']: expected a mapping, got 8: write resource names"),
        (
            "resources:\n  a/b:\n    gpus: 1\n    gpu: 2",
            (
                "line 4: resources['a/b'].gpu: this key is unknown: write resource names, and beneath each 'gpus:' and, "
                "where wanted, 'numa:', 'unhealthy:', 'recovered:', 'released:', 'withdrawn:', 'cdi:', 'pre_start:', 'links:', "
                "'partitions:', 'mig:', 'product:' and 'memory:'"
            ),
        ),
        (
            "resources:\n  a/b:\n    gpus: eight",
            (
                "line 3: resources['a/b'].gpus: expected a whole number or a list, got 'eight': write how many, such as "
                "'gpus: 8', or a list with uuid, numa, health, reason and device_nodes of each"
            ),
        ),
        (
            "resources: {a/b: {gpus: -1}}",
            "line 1: resources['a/b'].gpus: expected a whole number >= 0, got -1: write how",
        ),
        (
            "resources: {a/b: {gpus: 200001}}",
            "resources['a/b'].gpus: expected a whole number <= 200000, got 200001: write",
        ),
        ("resources: {a/b: {gpus: 1.5}}", "resources['a/b'].gpus: expected a whole number or a list, got 1.5: write"),
        ("resources: {a/b: {gpus: true}}", "resources['a/b'].gpus: expected a whole number or a list, got True: write"),
        ("resources: {a/b: {gpus: 2, numa: 0}}", "resources['a/b'].numa: expected a list or nothing, got 0: write the"),
        (
            "resources:\n  a/b:\n    gpus: 2\n    numa:\n    - 0\n    - one",
            (
                "line 6: resources['a/b'].numa[1]: expected a whole number or nothing, got 'one': write the number of a NUMA "
                "node, 0 to 1023, for each GPU, or null for no known place"
            ),
        ),
        (
            "resources: {a/b: {gpus: 1, numa: [1024]}}",
            "resources['a/b'].numa[0]: expected a whole number <= 1023, got 1024",
        ),
        (
            "resources: {a/b: {gpus: 2, numa: [0]}}",
            "line 1: resources['a/b'].numa: expected as many NUMA nodes as GPUs (2), got 1: write one for each",
        ),
        (
            "resources: {a/b: {gpus: 1, numa: [0, 0]}}",
            "line 1: resources['a/b'].numa: expected as many NUMA nodes as GPUs (1), got 2: write one for each",
        ),
        (
            "resources:\n  a/b:\n    gpus:\n    - {}\n    - numba: 1",
            "line 5: resources['a/b'].gpus[1].numba: this key is unknown: write how many, such as 'gpus: 8', or a list with",
        ),
        (
            "resources:\n  a/b:\n    gpus:\n    - 3",
            "line 4: resources['a/b'].gpus[0]: expected a mapping, got 3: write",
        ),
        (
            "resources: {a/b: {gpus: [{health: ill}]}}",
            "resources['a/b'].gpus[0].health: expected a state of health, got 'ill': write Healthy or Unhealthy",
        ),
        (
            "resources: {a/b: {gpus: [{reason: hot}]}}",
            (
                "resources['a/b'].gpus[0].reason: expected a reason only for an unhealthy GPU: write 'health: Unhealthy' too, or "
                "no reason"
            ),
        ),
        (
            "resources: {a/b: {gpus: 1, cdi: 3}}",
            "resources['a/b'].cdi: expected text or nothing, got 3: write the kind",
        ),
        (
            "resources: {a/b: {gpus: 1, cdi: gpu}}",
            "resources['a/b'].cdi: no kind of CDI devices: 'gpu': write the kind",
        ),
        ("resources: {a/b: {gpus: 1, cdi: a/b=c}}", "resources['a/b'].cdi: no kind of CDI devices: 'a/b=c': write the"),
        (
            "resources: {a/b: {gpus: [{uuid: a.}], cdi: a/b}}",
            "expected a UUID that ends in a letter or digit, as a CDI",
        ),
        (
            "resources: {a/b: {gpus: 1, pre_start: 1}}",
            "resources['a/b'].pre_start: expected true or false, got 1: write true or false",
        ),
        (
            "resources:\n  a/b:\n    gpus: 2\n    links:\n    - between: [0, 1]\n      by: string",
            (
                "line 6: resources['a/b'].links[0].by: expected a way between GPUs, got 'string': write nvlink, xgmi, pix, pxb, "
                "phb, node, sys"
            ),
        ),
        (
            "resources: {a/b: {gpus: 2, links: [[0, 1]]}}",
            "links[0]: expected a mapping, got a list: write a list such as [{between: [0, 1], by: nvlink, lanes: 2}]",
        ),
        (
            "resources: {a/b: {gpus: 2, links: [{between: [0, 1]}]}}",
            "links[0]: expected the key 'by', got none: write a list such as",
        ),
        (
            "resources: {a/b: {gpus: 2, links: [{between: [0], by: pix}]}}",
            "between: expected a list of length >= 2, got 1: write 2 to 64 indices or UUIDs of different GPUs",
        ),
        (
            "resources: {a/b: {gpus: 2, links: [{between: [0, 2], by: pix}]}}",
            "links[0].between[1]: expected the index (0 to 1) or UUID of a GPU of this resource, got 2",
        ),
        (
            "resources: {a/b: {gpus: 2, links: [{between: [0, 1, 0], by: pix}]}}",
            "links[0].between: expected each GPU once, got one twice, or two of its partitions: write 2 to 64",
        ),
        (
            "resources: {a/b: {gpus: 4, partitions: 2, mig: {0: [1g.5gb]}}}",
            "resources['a/b'].mig: expected either 'mig' or 'partitions', got both: remove one of them",
        ),
        (
            "resources: {a/b: {gpus: 4, partitions: 2, links: [{between: [2, 3], by: pix}]}}",
            "links[0].between: expected each GPU once, got one twice, or two of its partitions: write 2 to 64",
        ),
        (
            "resources: {a/b: {gpus: 2, links: [{between: [0, 1], by: pix, lanes: 2}]}}",
            "links[0].lanes: expected none with pix, got 2: write how many such links there are side by side, 1 to 64, for",
        ),
        (
            "resources: {a/b: {gpus: 2, links: [{between: [0, 1], by: xgmi, lanes: 0}]}}",
            "links[0].lanes: expected a whole number >= 1, got 0: write how many",
        ),
        (
            f"resources: {{a/b: {{gpus: 64, links: [{ALL_OF_64}, {ALL_OF_64}, {ALL_OF_64}]}}}}",
            "links[2]: expected at most 4096 pairs of linked GPUs, got more: leave out the far ones",
        ),
        (
            "resources: {a/b: {gpus: 2, partitions: 1}}",
            "partitions: expected a whole number >= 2, got 1: write how many in a row are partitions of one GPU, 2 to 1024",
        ),
        (
            "resources: {a/b: {gpus: [{uuid: 7}]}}",
            (
                "resources['a/b'].gpus[0].uuid: expected text or nothing, got 7: write 1 to 63 letters, digits, '.', '_', ':' "
                "and '-', in quotes if it looks like a number"
            ),
        ),
        (
            "resources: {a/b: {gpus: [{uuid: 'a,b'}]}}",
            "resources['a/b'].gpus[0].uuid: no device ID: 'a,b': write 1 to 63",
        ),
        (
            "resources:\n  a/b:\n    gpus:\n    - uuid: a\n    - uuid: a",
            "line 5: resources['a/b'].gpus[1].uuid: expected each UUID once, got 'a' again (GPU 0 has it): write another",
        ),
        (
            "resources: {a/b: {gpus: [{numa: 0}], numa: [0]}}",
            (
                "resources['a/b'].gpus[0].numa: expected a GPU's NUMA node in one place, got it here and in the resource's "
                "'numa': remove one of them"
            ),
        ),
        (
            "resources: {a/b: {gpus: [{device_nodes: [/dev/null, /etc/passwd]}]}}",
            (
                "resources['a/b'].gpus[0].device_nodes[1]: no path of a device node: '/etc/passwd': write a list of paths below "
                "/dev, such as [/dev/null]"
            ),
        ),
        ("resources: {a/b: {gpus: [{device_nodes: [/dev/../etc/passwd]}]}}", "no path of a device node"),
        (r'resources: {a/b: {gpus: [{device_nodes: ["/dev/a\0b"]}]}}', "no path of a device node: '/dev/a\\x00b'"),
        (r'resources: {a/b: {gpus: [{device_nodes: ["/dev/a\u202e"]}]}}', "no path of a device node: '/dev/a\\u202e'"),
        (r'resources: {a/b: {gpus: 1, mig: {0: ["1g.5gb\n"]}}}', "resources['a/b'].mig[0]: expected"),
        (
            "resources: {a/b: {gpus: [{device_nodes: /dev/null}]}}",
            "device_nodes: expected a list, got '/dev/null': write",
        ),
        (
            "resources:\n  a/b:\n    gpus: 2\n    unhealthy:\n      1:\n",
            (
                "line 5: resources['a/b'].unhealthy[1]: expected text or a mapping, got nothing: write index or UUID and the "
                "reason in 1 to 256 characters, such as '3: fell off the bus', or as '3: {reason: fell off the bus, kind: "
                "reset-required}'"
            ),
        ),
        (
            "resources: {a/b: {gpus: 2, unhealthy: {1: ''}}}",
            "unhealthy[1]: expected text of length >= 1, got '': write",
        ),
        (
            "resources:\n  a/b:\n    gpus: 2\n    unhealthy:\n      1:\n        reason: hot\n        kind: bad",
            (
                "line 7: resources['a/b'].unhealthy[1].kind: expected a kind of trouble, got 'bad': write application, "
                "restart-app, reset-required, unknown"
            ),
        ),
        (
            "resources: {a/b: {gpus: 2, unhealthy: {1: {kind: unknown}}}}",
            "unhealthy[1]: expected the key 'reason', got none: write index or UUID and the reason",
        ),
        (
            "resources: {a/b: {gpus: 2, unhealthy: {1: {reason: hot, since: 3}}}}",
            "unhealthy[1].since: this key is unknown: write index or UUID",
        ),
        (
            "resources: {a/b: {gpus: 2, unhealthy: {1: 5}}}",
            "unhealthy[1]: expected text or a mapping, got 5: write index",
        ),
        (
            "resources:\n  a/b:\n    gpus: 2\n    withdrawn:\n    - 0\n    - 2",
            "line 6: resources['a/b'].withdrawn[1]: expected the index (0 to 1) or UUID of a GPU of this resource, got 2",
        ),
        (
            "resources: {a/b: {gpus: 2, released: 1}}",
            "released: expected a list or nothing, got 1: write indices or UUIDs, such as [3]",
        ),
        (
            "resources: {a/b: {gpus: 2, recovered: [x, null]}}",
            "recovered[1]: expected a whole number or text, got nothing: write indices",
        ),
        (
            "resources: {a/b: {gpus: 2, unhealthy: [1]}}",
            "unhealthy: expected a mapping or nothing, got a list: write index",
        ),
        (
            "resources: {a/b: {gpus: 2, unhealthy: {2: hot}}}",
            "resources['a/b'].unhealthy[2]: expected the index (0 to 1) or UUID of a GPU of this resource, got 2",
        ),
        ("resources: {a/b: {gpus: 0, unhealthy: {0: hot}}}", "expected the index (there is none) or UUID of a GPU"),
        (
            "resources: {a/b: {gpus: 2, unhealthy: {GPU-9: hot}}}",
            "unhealthy['GPU-9']: expected the index (0 to 1) or UUID",
        ),
        (
            "resources: {a/b: {gpus: 2, unhealthy: {null: hot}}}",
            "unhealthy: expected keys that are a whole number or text, got nothing: write index or UUID",
        ),
        (
            "resources:\n  a/b: {gpus: 1}\n  a/c: {gpus: 200000}",
            "line 3: resources['a/c']: expected at most 200000 GPUs on a node, got 200001: write fewer",
        ),
        (
            "resources:\n  a/b: {gpus: 1}\n  a/b: {gpus: 2}",
            "line 3: expected each key once, got 'a/b' again: remove one",
        ),
        ("a: &x 1\nb: *x", "line 1: expected no anchors ('&') and aliases ('*'), got one: write the value out"),
        ("resources: {a/b: !!python/object/apply:os.system [id]}", "line 1: expected no tags, got one"),
        ("{[1]: 2}", "line 1: expected a word or number as a key, got a list or mapping: write one"),
        ("[" * 100_000, "line 1: expected at most 8 levels, got more: keep to the format"),
        ("a: 1\n---\nb: 2", "line 3: expected one document, got another: remove it and its '---'"),
        (
            "a: 1\nb: [",
            "expected YAML, got something else (did not find expected node content): correct this line or the one",
        ),
        ("a: 1\n\tb: 2", "line 2: expected YAML, got something else ("),
        (b"a: 1\nb: \xff", "line 2: expected UTF-8 text, got the byte 0xff: save it as UTF-8"),
        ("a: \x00", "line 1: expected YAML, got something else (unacceptable character #x0000: control"),
    ],
)
def test_what_is_wrong_is_said(text: str | bytes, says: str) -> None:
    message = error(text)
    assert message.startswith("p.yaml, line ")
    assert says in message


def test_too_many_resource_names() -> None:
    text = "resources:\n" + "".join(f"  a.com/r{i}: {{gpus: 1}}\n" for i in range(257))
    assert "resources: expected a mapping of length <= 256, got 257" in error(text)


@given(st.binary(max_size=200) | st.text(alphabet="resoucgpun/ab:{}[]-&*!'\"\n 0123,", max_size=200).map(str.encode))
def test_whatever_comes_is_either_a_profile_or_a_short_error(content: bytes) -> None:
    message = ""
    try:
        parse(content, "p.yaml")
    except ProfileError as wrong:
        message = str(wrong)
    assert len(message) < 1000


def test_a_node_has_as_many_gpus_as_it_may_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MAX_GPUS", 3)
    assert len(parse(b"resources: {a/b: {gpus: 2}, a/c: {gpus: 1}}", "p")) == 2
    with pytest.raises(ProfileError, match="at most 3 GPUs on a node, got 4"):
        parse(b"resources: {a/b: {gpus: 2}, a/c: {gpus: 2}}", "p")


@pytest.mark.parametrize("length", [2, 100_000])
def test_an_error_stays_short_whatever_the_key(length: int) -> None:
    assert len(error(f"{'k' * length}: 1")) < 300


def test_uuids_are_the_same_at_each_start_and_differ_between_gpus() -> None:
    text = b"resources:\n  nvidia.com/gpu: {gpus: 3}\n  amd.com/gpu: {gpus: 3}\n"
    first, again = parse(text, "p.yaml"), parse(text, "p.yaml")
    assert first == again
    ids = [gpu.uuid for found in first.values() for gpu in found.gpus]
    assert len(set(ids)) == 6
    # Written out, because a pod was given this one yesterday: it must never change.
    assert ids[0] == "GPU-57349805-55c8-5878-8754-9e15156c6182"
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", one) for one in ids)
    assert uuid.UUID(ids[0].removeprefix("GPU-")).version == 5


def test_a_list_says_the_same_as_the_short_form() -> None:
    assert gpus("gpus: [{}, {}]") == gpus("gpus: 2")


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("default", {"nvidia.com/gpu": ([0, 0, 0, 0, 1, 1, 1, 1], [])}),
        ("hives", {"amd.com/gpu": ([0, 0, 0, 0, 1, 1, 1, 1], [])}),
        ("large", {"nvidia.com/gpu": ([None] * 10_000, [])}),
        ("partitions", {"amd.com/gpu": ([None] * 64, [])}),
        ("sick", {"nvidia.com/gpu": ([0, 0, 1, 1], [2])}),
        ("small", {"nvidia.com/gpu": ([None, None], [])}),
        ("two-resources", {"nvidia.com/gpu": ([0, 0, 1, 1], []), "amd.com/gpu": ([0, 1], [])}),
    ],
)
def test_shipped_profile(name: str, seen: dict[str, tuple[list[int | None], list[int]]]) -> None:
    path, edited = find(name)
    assert not edited
    found = parse(read(path), name)
    assert {
        resource: (
            [gpu.numa_node for gpu in there.gpus],
            [gpu.index for gpu in there.gpus if gpu.health is Health.UNHEALTHY],
        )
        for resource, there in found.items()
    } == seen


def test_every_shipped_profile_has_a_row_above() -> None:
    assert shipped() == ("default", "hives", "large", "partitions", "sick", "small", "two-resources")


def test_a_path_is_a_file_that_people_edit(tmp_path: Path) -> None:
    path = tmp_path / "default"
    path.write_text("resources: {}\n")
    assert find(str(path)) == (path, True)
    assert parse(read(path), "p") == {}


def test_an_unknown_profile_is_told_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"default, hives, .*, two-resources\); got 'larg', which is no file"):
        find("larg")
    with pytest.raises(ProfileError, match="which is no file"):
        find(str(tmp_path))


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo, big = tmp_path / "fifo", tmp_path / "big"
    os.mkfifo(fifo)
    big.write_bytes(b"#" * 11)
    monkeypatch.setattr(profile, "MAX_BYTES", 10)
    full = tmp_path / "full"
    full.write_bytes(b"#" * 10)
    assert len(read(full)) == 10
    for path, says in [
        (tmp_path / "none", r"none: the profile can't be read \(No such file or directory\): write it"),
        (fifo, "fifo: expected a plain file, got something else"),
        (tmp_path, "can't be read|expected a plain file"),
        (big, "big: expected at most 10 bytes, got more"),
    ]:
        with pytest.raises(ProfileError, match=says):
            read(path)
