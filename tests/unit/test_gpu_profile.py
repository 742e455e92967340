"""Profiles: what a person may write, and what they are told when it is wrong."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.gpu.backend import Sight
from devices.gpu.model import GPU, Link, Way
from devices.gpu.simulated import profile
from devices.gpu.simulated.document import ProfileError
from devices.gpu.simulated.profile import parse, read
from devices.model import Health

ALL_OF_64 = f"{{between: {list(range(64))}, by: pix}}"


def described(beneath: str) -> Sight:
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
    ("beneath", "links"),
    [
        ("links:", ["", "", "", ""]),
        ("links: [{between: [0, 1], by: pix}]", ["pix b", "pix a", "", ""]),
        ("links: [{between: [d, 1], by: xgmi, lanes: 3}]", ["", "xgmi d 3", "", "xgmi b 3"]),
        ("links: [{between: [0, 1, 2], by: sys}]", ["sys b, sys c", "sys a, sys c", "sys a, sys b", ""]),
        ("links: [{between: [0, 1], by: phb}, {between: [1, 0], by: node}]", ["phb b, node b", "phb a, node a", "", ""]),
        ("withdrawn: [1]\nlinks: [{between: [0, 1], by: pxb}]", ["pxb b", "", ""]),
    ],
)  # fmt: skip
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
        "secret", "- secret", "secret: secret", "!secret x", "secret: 1\nsecret: 2", "root:*:secret:\nx:secret",
        "5: secret",
    ],
)  # fmt: skip
def test_of_a_file_that_is_no_profile_nothing_is_said_again(text: str) -> None:
    assert "secret" not in error(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: the file is empty. Write"),
        ("gpus: 8", "line 1: the profile: the key 'resources' is missing"),
        ("resources:\n", "line 1: resources: Expected `object`, got `null`. Write"),
        ("resources:\n  gpu: {gpus: 1}", "line 2: resources.gpu: the resource name 'gpu' has no domain. Write one before it, such as"),
        ("resources: {3: 4}", "line 1: resources: Expected `str`, got `int` as a key"),
        ("resources:\n  a/b:", "line 2: resources['a/b']: Expected `object`, got `null`"),
        ("resources:\n  a/b:\n    gpus: 1\n    gpu: 2", "line 4: resources['a/b'].gpu: this key is unknown"),
        ("resources:\n  a/b:\n    gpus: eight", "line 3: resources['a/b'].gpus: Expected `int | array`, got `str`. Write how many"),
        ("resources: {a/b: {gpus: -1}}", "line 1: resources['a/b'].gpus: Expected `int` >= 0"),
        ("resources: {a/b: {gpus: 200001}}", "resources['a/b'].gpus: Expected `int` <= 200000. Write"),
        ("resources:\n  a/b:\n    gpus: 2\n    numa:\n    - 0\n    - one", "line 6: resources['a/b'].numa[1]: Expected `int | null`, got `str`"),
        ("resources: {a/b: {gpus: 1, numa: [1024]}}", "resources['a/b'].numa[0]: Expected `int` <= 1023"),
        ("resources: {a/b: {gpus: 2, numa: [0]}}", "line 1: resources['a/b'].numa: 2 GPUs, and 1 of them with a NUMA node. Write one for each"),
        ("resources:\n  a/b:\n    gpus:\n    - {}\n    - numba: 1", "line 5: resources['a/b'].gpus[1].numba: this key is unknown"),
        ("resources: {a/b: {gpus: [{health: ill}]}}", "resources['a/b'].gpus[0].health: Invalid enum value 'ill'. Write Healthy or Unhealthy"),
        ("resources: {a/b: {gpus: [{reason: hot}]}}", "resources['a/b'].gpus[0].reason: a healthy GPU has no reason. Write"),
        ("resources: {a/b: {gpus: 1, cdi: gpu}}", "resources['a/b'].cdi: no kind of CDI devices: 'gpu'. Write the kind"),
        ("resources: {a/b: {gpus: 1, cdi: a/b=c}}", "resources['a/b'].cdi: no kind of CDI devices: 'a/b=c'. Write the"),
        ("resources: {a/b: {gpus: [{uuid: a.}], cdi: a/b}}", "the UUID 'a.' is no CDI name, which ends with a letter or digit"),
        ("resources: {a/b: {gpus: 1, pre_start: 1}}", "resources['a/b'].pre_start: Expected `bool`, got `int`. Write true or false"),
        ("resources:\n  a/b:\n    gpus: 2\n    links:\n    - between: [0, 1]\n      by: string", "line 6: resources['a/b'].links[0].by: Invalid enum value 'string'. Write nvlink, xgmi"),
        ("resources: {a/b: {gpus: 2, links: [{between: [0, 1]}]}}", "links[0]: Object missing required field `by`. Write a list such as"),
        ("resources: {a/b: {gpus: 2, links: [{between: [0, 2], by: pix}]}}", "links[0].between[1]: 2 is no GPU of this resource. Write a UUID or an index (0 to 1)"),
        ("resources: {a/b: {gpus: 2, links: [{between: [0, 1, 0], by: pix}]}}", "links[0].between: a GPU is here twice, or two of its partitions"),
        ("resources: {a/b: {gpus: 4, partitions: 2, mig: {0: [1g.5gb]}}}", "resources['a/b'].mig: 'mig' and 'partitions' do not go together. Remove one of them"),
        ("resources: {a/b: {gpus: 4, partitions: 2, links: [{between: [2, 3], by: pix}]}}", "links[0].between: a GPU is here twice, or two of its partitions"),
        ("resources: {a/b: {gpus: 2, links: [{between: [0, 1], by: pix, lanes: 2}]}}", "links[0].lanes: 2 lanes, which pix does not have"),
        ("resources: {a/b: {gpus: 2, links: [{between: [0, 1], by: xgmi, lanes: 0}]}}", "links[0].lanes: Expected `int` >= 1. Write how many"),
        (f"resources: {{a/b: {{gpus: 64, links: [{ALL_OF_64}, {ALL_OF_64}, {ALL_OF_64}]}}}}", "links[2]: more than 4096 pairs of linked GPUs. Leave out the far ones"),
        ("resources: {a/b: {gpus: 2, partitions: 1}}", "partitions: Expected `int` >= 2"),
        ("resources: {a/b: {gpus: [{uuid: 7}]}}", "resources['a/b'].gpus[0].uuid: Expected `str | null`, got `int`"),
        ("resources: {a/b: {gpus: [{uuid: 'a,b'}]}}", "resources['a/b'].gpus[0].uuid: no device ID: 'a,b'. Write 1 to 63"),
        ("resources:\n  a/b:\n    gpus:\n    - uuid: a\n    - uuid: a", "line 5: resources['a/b'].gpus[1].uuid: the UUID 'a' is here twice: GPU 0 has it. Write another"),
        ("resources: {a/b: {gpus: [{numa: 0}], numa: [0]}}", "resources['a/b'].gpus[0].numa: the GPU's NUMA node is here and in the resource's 'numa'. Remove one of them"),
        ("resources: {a/b: {gpus: [{device_nodes: [/dev/null, /etc/passwd]}]}}", "resources['a/b'].gpus[0].device_nodes[1]: no path of a device node: '/etc/passwd'"),
        ("resources: {a/b: {gpus: [{device_nodes: [/dev/../etc/passwd]}]}}", "no path of a device node"),
        ('resources: {a/b: {gpus: [{device_nodes: ["/dev/a\\0b"]}]}}', "no path of a device node: '/dev/a\\x00b'"),
        ('resources: {a/b: {gpus: [{device_nodes: ["/dev/a\\u202e"]}]}}', "no path of a device node: '/dev/a\\u202e'"),
        ('resources: {a/b: {gpus: 1, mig: {0: ["1g.5gb\\n"]}}}', "resources['a/b'].mig[0]: Expected `str` matching"),
        ("resources:\n  a/b:\n    gpus: 2\n    unhealthy:\n      1:\n", "line 5: resources['a/b'].unhealthy[1]: Expected `str | object`, got `null`"),
        ("resources:\n  a/b:\n    gpus: 2\n    unhealthy:\n      1:\n        reason: hot\n        kind: bad", "line 7: resources['a/b'].unhealthy[1].kind: Invalid enum value 'bad'. Write application, restart-app"),
        ("resources: {a/b: {gpus: 2, unhealthy: {1: {kind: unknown}}}}", "unhealthy[1]: Object missing required field `reason`"),
        ("resources:\n  a/b:\n    gpus: 2\n    withdrawn:\n    - 0\n    - 2", "line 6: resources['a/b'].withdrawn[1]: 2 is no GPU of this resource. Write a UUID or an index (0 to 1)"),
        ("resources: {a/b: {gpus: 2, unhealthy: {2: hot}}}", "resources['a/b'].unhealthy[2]: 2 is no GPU of this resource. Write a UUID or an index (0 to 1)"),
        ("resources: {a/b: {gpus: 0, unhealthy: {0: hot}}}", "0 is no GPU of this resource. Write a UUID or an index (there is none)"),
        ("resources: {a/b: {gpus: 2, unhealthy: {null: hot}}}", "unhealthy: Expected `int | str`, got `null` as a key"),
        ("resources:\n  a/b: {gpus: 1}\n  a/c: {gpus: 200000}", "line 3: resources['a/c']: 200001 GPUs on a node. Allowed: at most 200000"),
        ("resources:\n  a/b: {gpus: 1}\n  a/b: {gpus: 2}", "line 3: the key 'a/b' is here twice. Remove one of them"),
        ("a: &x 1\nb: *x", "line 1: anchors ('&') and aliases ('*') are not allowed. Write the value out"),
        ("resources: {a/b: !!python/object/apply:os.system [id]}", "line 1: tags are not allowed. Remove it"),
        ("{[1]: 2}", "line 1: a key must be a word, not a list or a mapping"),
        ("[" * 100_000, "line 1: more than 9 levels"),
        ("a: 1\n---\nb: 2", "line 3: another document. Remove it and its '---'"),
        ("a: 1\nb: [", "not YAML (did not find expected node content). Correct this line or the one"),
        ("a: 1\n\tb: 2", "line 2: not YAML ("),
        (b"a: 1\nb: \xff", "line 2: not UTF-8 (the byte 0xff). Save it as UTF-8"),
        ("a: \0", "line 1: not YAML (unacceptable character #x0000: control"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(text: str | bytes, says: str) -> None:
    message = error(text)
    assert message.startswith("p.yaml, line ")
    assert says in message


@given(st.binary(max_size=200) | st.text(alphabet="resoucgpun/ab:{}[]-&*!'\"\n 0123,", max_size=200).map(str.encode))
def test_whatever_comes_is_either_a_profile_or_a_short_error(content: bytes) -> None:
    message = ""
    try:
        parse(content, "p.yaml")
    except ProfileError as wrong:
        message = str(wrong)
    assert len(message) < 1000


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


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo, big = tmp_path / "fifo", tmp_path / "big"
    os.mkfifo(fifo)
    big.write_bytes(b"#" * 11)
    monkeypatch.setattr(profile, "MAX_BYTES", 10)
    full = tmp_path / "full"
    full.write_bytes(b"#" * 10)
    assert len(read(full)) == 10
    for path, says in [
        (tmp_path / "none", r"none: cannot read the profile \(No such file or directory\)\. Write it"),
        (fifo, "fifo: not a plain file"),
        (tmp_path, "cannot read|not a plain file"),
        (big, "big: more than 10 bytes"),
    ]:
        with pytest.raises(ProfileError, match=says):
            read(path)
