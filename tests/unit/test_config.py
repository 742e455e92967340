"""The configuration file: what NVIDIA's plugin accepts starts here and means the same; what is wrong is named, with its line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.policy import (
    Bridging,
    CdiFallback,
    IdStrategy,
    ListStrategy,
    MigStrategy,
    Policy,
    Portion,
    Recovery,
    Slices,
)
from gateway.configuration import document
from gateway.configuration import file as config
from gateway.configuration.settings import ConfigError
from gateway_lab.trials.faults import descriptors


def policy(text: str, **said: Any) -> Policy:
    return config.policy(config.parse(text.encode(), "c.yaml", **said), {}, "simulated")


def slicing(text: str) -> str:
    """A file with this beneath ``timeSlicing``."""
    return f"sharing:\n  timeSlicing:\n    {text}\n"


def resources(text: str) -> str:
    return slicing(f"resources:\n    - {text}")


def test_the_example_in_the_documentation_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    file = config.parse(example.encode(), "c.yaml", strict=True)
    assert (file.warnings, len(file.globbed), list(file.slices)) == ((), 1, ["nvidia.com/gpu"])
    assert {given.source.rpartition(": ")[2] for given in file.given.values()} == {
        "flags.migStrategy",
        "gateway.healthRecovery",
        "gateway.excludeDevices",
        "gateway.cdiFallback",
        "gateway.honourResourceNames",
        "gateway.bridge.folder",
    }


EMPTY = ["", "# nothing\n", "---\n", "null\n", "{}", "version:", 'version: ""', "version: v1", "flags:", "flags: {}"]
EMPTY += [
    "flags: {plugin: null, gfd: null}",
    "sharing:",
    "sharing: {mps: null}",
    "imex: null",
    "gateway:",
    "resources:",
]
EMPTY += ["imex: {channelIDs: [], required: false}", "flags: {migStrategy: null}", "gateway: {devices: []}"]
EMPTY += ["flags: {plugin: {deviceListStrategy: ~}}", "flags: {useNodeFeatureAPI: true, mpsRoot: /x}", "--- {}\n--- [}"]
EMPTY += [
    "flags: {gfd: {sleepInterval: 60s, oneshot: no, whatever: [1]}}",
    "resources: {gpus: [], mig: null}",
    "{}\n...\n",
]
EMPTY += ["flags: {deviceDiscoveryStrategy: nvml, mpsRoot: ''}"]


@pytest.mark.parametrize("text", EMPTY)
def test_what_says_nothing_changes_nothing(text: str) -> None:
    file = config.parse(text.encode(), "c.yaml")
    assert (config.policy(file, {}, "simulated"), file.warnings) == (Policy(), ())


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        pytest.param("FLAGS: {MigStrategy: mixed}", "mig_strategy", MigStrategy.MIXED, id="keys of any case"),
        pytest.param("flags: {Plugin: {deviceidstrategy: index}}", "id_strategy", IdStrategy.INDEX, id="keys of any case beneath plugin"),
        pytest.param("flags: {plugin: {deviceListStrategy: cdi-cri}}", "list_strategies", frozenset({ListStrategy.CDI_CRI}), id="a strategy as a text"),
        pytest.param("flags: {plugin: {deviceListStrategy: [cdi-cri]}}", "list_strategies", frozenset({ListStrategy.CDI_CRI}), id="strategies as a list"),
        pytest.param("flags: {gdsEnabled: yes}", "gds", True, id="yes is true"),
        pytest.param("flags: {gdsEnabled: On}", "gds", True, id="On is true"),
        pytest.param("flags: {gdsEnabled: y}", "gds", True, id="y is true"),
        pytest.param("flags: {gdsEnabled: !!bool 'yes'}", "gds", True, id="a tag"),
        pytest.param("flags: {gdsEnabled: false, gdsEnabled: true}", "gds", True, id="of a key twice the last"),
        pytest.param("flags: {GDSEnabled: false, gdsEnabled: true}", "gds", True, id="of a key in two spellings the last in the alphabet"),
        pytest.param("flags: {gdsEnabled: true, GDSEnabled: false}", "gds", True, id="wherever they stand"),
        pytest.param("x: &a {gdsEnabled: true}\nflags: *a", "gds", True, id="an alias"),
        pytest.param("x: &a {gdsEnabled: true}\nflags: {<<: *a, mofedEnabled: true}", "gds", True, id="a merge"),
        pytest.param("x: &a {gdsEnabled: true}\nflags: {<<: *a, gdsEnabled: false}", "gds", False, id="a merge before the key"),
        pytest.param("x: &a {gdsEnabled: true}\nflags: {gdsEnabled: false, <<: *a}", "gds", True, id="a merge after the key"),
        pytest.param("x: [&a {gdsEnabled: true}, &b {gdsEnabled: false}]\nflags: {<<: [*a, *b]}", "gds", True, id="of merges the first"),
        pytest.param("x: &a [&a {gdsEnabled: true}]\nflags: *a", "gds", True, id="the anchor inside of another of its name"),
        pytest.param("\ufeffflags: {gdsEnabled: true}", "gds", True, id="a byte order mark"),
        pytest.param('{"flags": {"gdsEnabled": true}}', "gds", True, id="JSON"),
        pytest.param("flags:\n  gdsEnabled:\ttrue\t# tabs\n", "gds", True, id="tabs"),
        pytest.param("flags: {nvidiaDriverRoot: 1:30}", "driver_root", "/1:30", id="no number of base 60"),
        pytest.param("flags: {nvidiaDriverRoot: 2026-01-01}", "driver_root", "/2026-01-01", id="no date"),
        pytest.param("flags: {nvidiaDriverRoot: !!str 5}", "driver_root", "/5", id="text by a tag"),
        pytest.param("flags: {nvidiaDriverRoot: !own 5}", "driver_root", "/5", id="text by a tag of one's own"),
        pytest.param("flags: {nvidiaDriverRoot: ! 5}", "driver_root", "/5", id="text by the tag without a name"),
        pytest.param("flags: {nvidiaDriverRoot: 1e400}", "driver_root", "/1e400", id="text, for want of such a number"),
        pytest.param("flags: {nvidiaDriverRoot: 'yes'}", "driver_root", "/yes", id="text by quotes"),
        pytest.param("flags: {nvidiaDriverRoot: ''}", "driver_root", "/", id="no driver root"),
        pytest.param("flags: {nvidiaDevRoot: ''}", "dev_root", "", id="no dev root"),
        pytest.param("gateway: {healthRecovery: off}", "health_recovery", Recovery.OFF, id="off, which YAML takes for false"),
        pytest.param("gateway: {healthRecovery: 'off'}", "health_recovery", Recovery.OFF, id="off in quotes"),
        pytest.param("gateway: {cdiFallback: envvar}", "cdi_fallback", CdiFallback.ENVVAR, id="a fallback"),
    ],
)  # fmt: skip
def test_it_is_read_as_go_reads_it(text: str, field: str, value: object) -> None:
    assert getattr(policy(text), field) == value


def test_utf_16_is_read() -> None:
    assert config.policy(config.parse("flags: {gdsEnabled: true}".encode("utf-16"), "c"), {}, "amd").gds


@pytest.mark.parametrize(
    ("text", "slices"),
    [
        ("{name: nvidia.com/gpu, replicas: 3}", {"nvidia.com/gpu": Slices(3, "nvidia.com/gpu")}),
        ("{name: gpu, replicas: 3}", {"nvidia.com/gpu": Slices(3, "nvidia.com/gpu")}),
        ("{name: amd.com/gpu, replicas: 2}", {"amd.com/gpu": Slices(2, "amd.com/gpu")}),
        ("{name: gpu, replicas: 2.0}", {"nvidia.com/gpu": Slices(2, "nvidia.com/gpu")}),
        ("{name: gpu, replicas: 1e1}", {"nvidia.com/gpu": Slices(10, "nvidia.com/gpu")}),
        ("{name: gpu, replicas: 0x10}", {"nvidia.com/gpu": Slices(16, "nvidia.com/gpu")}),
        ("{name: gpu, replicas: 010}", {"nvidia.com/gpu": Slices(8, "nvidia.com/gpu")}),
        ("{name: gpu, replicas: 1_0}", {"nvidia.com/gpu": Slices(10, "nvidia.com/gpu")}),
        (
            "{name: gpu, replicas: 2}\n    - {name: nvidia.com/gpu, replicas: 4}",
            {"nvidia.com/gpu": Slices(4, "nvidia.com/gpu")},
        ),
        (
            "{name: gpu, replicas: 4}\n    - {name: nvidia.com/gpu, replicas: 2}",
            {"nvidia.com/gpu": Slices(4, "nvidia.com/gpu")},
        ),
        (
            "{name: mig-1g.5gb, replicas: 2}\n    - {name: gpu, replicas: 3}\n    renameByDefault: true",
            {
                "nvidia.com/mig-1g.5gb": Slices(2, "nvidia.com/mig-1g.5gb.shared"),
                "nvidia.com/gpu": Slices(3, "nvidia.com/gpu.shared"),
            },
        ),
    ],
)
def test_time_slicing(text: str, slices: dict[str, Slices]) -> None:
    made = policy(resources(text))
    assert (made.slices, made.fail_requests_greater_than_one) == (slices, False)


SOME = "{name: gpu, replicas: 2, devices: [0, GPU-1, '0:1']}"


@pytest.mark.parametrize(
    ("text", "replicas", "portions"),
    [
        pytest.param(SOME, 0, (Portion(("0", "GPU-1", "0:1"), 2, "nvidia.com/gpu"),), id="by index and UUID"),
        pytest.param("{name: gpu, replicas: 2, devices: [0:1]}", 0, (Portion(("0:1",), 2, "nvidia.com/gpu"),), id="MIG"),
        pytest.param("{name: gpu, replicas: 2, devices: 3}", 0, (Portion(3, 2, "nvidia.com/gpu"),), id="the first"),
        pytest.param("{name: gpu, replicas: 65536}", 65536, (), id="the most replicas"),
        pytest.param("{name: gpu, replicas: 2, devices: []}", 0, (Portion((), 2, "nvidia.com/gpu"),), id="none"),
        pytest.param("{name: gpu, replicas: 2, devices: all}", 2, (), id="all"),
        pytest.param(
            SOME + "\n    - {name: gpu, replicas: 8, rename: many, devices: [3]}", 0,
            (Portion(("0", "GPU-1", "0:1"), 2, "nvidia.com/gpu"), Portion(("3",), 8, "nvidia.com/many")), id="two portions",
        ),
        pytest.param(
            SOME + "\n    - {name: gpu, replicas: 8}", 8,
            (Portion(("0", "GPU-1", "0:1"), 2, "nvidia.com/gpu"),), id="a portion, and the rest",
        ),
        pytest.param(
            "{name: gpu, replicas: 8}\n    - " + SOME, 8,
            (Portion(("0", "GPU-1", "0:1"), 2, "nvidia.com/gpu"),), id="the rest, and a portion",
        ),
        pytest.param(
            "{name: gpu, replicas: 8}\n    - " + SOME + "\n    - {name: gpu, replicas: 4}", 8,
            (Portion(("0", "GPU-1", "0:1"), 2, "nvidia.com/gpu"),), id="the rest twice, and a portion",
        ),
    ],
)  # fmt: skip
def test_devices_count_where_they_are_honoured(text: str, replicas: int, portions: tuple[Portion, ...]) -> None:
    honoured = policy(resources(text + "\ngateway: {honourResourceNames: true}"))
    assert honoured.slices == {"nvidia.com/gpu": Slices(replicas, "nvidia.com/gpu", portions)}
    plain = policy(resources(text)).slices["nvidia.com/gpu"]
    assert (plain.replicas > 1, plain.portions) == (True, ())


BRIDGE = """
gateway:
  bridge:
    folder: /run/dp-bridge
    grace: 90
    withdraw: 7200.5
    allow: [vendor.example/*, other.example/fpga]
    repeat: [vendor.example/nic]
    rename:
      - {resource: vendor.example/nic, name: vendor.example/nic-old}
    deadlines:
      - {resource: vendor.example/fpga, seconds: 600}
"""


def test_the_file_configures_the_bridge() -> None:
    found = policy(BRIDGE)
    assert (found.bridge, found.bridge_grace, found.bridge_withdraw) == ("/run/dp-bridge", 90.0, 7200.5)
    assert found.bridging == Bridging(
        ("vendor.example/*", "other.example/fpga"),
        ("vendor.example/nic",),
        {"vendor.example/nic": "vendor.example/nic-old"},
        (("vendor.example/fpga", 600.0),),
    )


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("folder: run", "'run' is not an absolute path"),
        ("grace: -1", "'-1' is not a number from 0 to 2592000"),
        ("grace: true", "must be a number of seconds"),
        ("allow: vendor.example/*", "must be a list"),
        ("rename: [{resource: a.example/b}]", "the key 'name' is missing"),
        ("rename: [{resource: a.example/b, name: b}]", "the resource name 'b' has no domain"),
        ("rename: [{resource: a.e/b, name: a.e/c}, {resource: a.e/d, name: a.e/c}]", "is here twice"),
        (
            "rename: [{resource: a.e/b, name: a.e/c}, {resource: a.e/b, name: a.e/d}]",
            "a.e/b or the name a.e/d is here twice",
        ),
        ("deadlines: [{resource: a.example/b, seconds: 0}]", "must be 1 to 600 seconds"),
    ],
)
def test_what_is_wrong_of_the_bridge_is_refused(key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        policy(f"gateway: {{bridge: {{{key}}}}}")


WARNED = [
    ("flags:\n  migStrategi: none", "line 2: flags.migStrategi: unknown key, ignored; did you mean flags.migStrategy?", True),
    ("flags:\n  passDeviceSpecs: true", "line 2: flags.passDeviceSpecs: unknown key, ignored; it belongs at flags.plugin.passDeviceSpecs", True),
    ("flag:", "line 1: flag: unknown key, ignored; did you mean flags?", True),
    ("a:\n", "line 1: the file: only unknown keys (1). Known are version, flags, ", True),
    ("version:\na:\n", "line 2: a: unknown key, ignored", True),
    ("\nimex: {chanelIDs: [0]}", "line 2: imex.chanelIDs: unknown key, ignored; did you mean imex.channelIDs?", True),
    ("gateway: {honorResourceNames: true}", "did you mean gateway.honourResourceNames?", True),
    (slicing("resources: [{name: gpu, replicas: 2, Rename: x}]"), "line 3: sharing.timeSlicing.resources[0].Rename", True),
    ("resources: {gpus: [{pattern: '*', name: a}]}", "resources: ignored, as by NVIDIA's plugin. To use it, set gateway.honour", False),
    (resources("{name: gpu, replicas: 2, rename: a}"), "line 4: sharing.timeSlicing.resources[0].rename: ignored, as", False),
    (resources("{name: gpu, replicas: 2, devices: [0]}"), "resources[0].devices: ignored, as by NVIDIA's plugin. To use it, set gateway.honour", False),
    (resources("{name: gpu, replicas: 2, devices: 2}"), "resources[0].devices: ignored, as by NVIDIA's plugin. To use it, set gateway.honour", False),
    (resources("{name: gpu, replicas: 2}\n    - {name: gpu, replicas: 2}"), "line 5: sharing.timeSlicing.resources[1]: nv", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says", "unknown"), WARNED)
def test_what_is_ignored_is_said_and_an_unknown_key_refused_where_that_is_wanted(
    text: str, says: str, unknown: bool
) -> None:
    (warning,) = config.parse(text.encode(), "c.yaml").warnings
    assert warning.startswith("c.yaml, line ")
    assert says in warning
    if unknown:
        with pytest.raises(ConfigError, match="unknown key"):
            config.parse(text.encode(), "c.yaml", strict=True)
    else:
        assert config.parse(text.encode(), "c.yaml", strict=True).warnings == (warning,)


def test_a_thousand_wrong_keys_are_summed_up() -> None:
    warnings = config.parse(
        b"version:\n" + "\n".join(f"k{number}:" for number in range(1000)).encode(), "c.yaml"
    ).warnings
    assert (len(warnings), warnings[-1]) == (21, "c.yaml: and 980 more of this kind")


OTHERS = (
    "root:*:19700:0:99999:7:::\nsecret:$y$j9T$secret:19700:0:99999:7:::\n",
    "secret",
    "- secret: secret",
    "password: secret\nsecret: 5",
    "{secret: secret}",
    "a: *secret",
    "root:secret\n\tsecret: 5",
    "[secret",
)
"""Files that are no configuration."""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("text", OTHERS)
def test_of_a_file_that_is_no_configuration_nothing_is_said_again(text: str, *, strict: bool) -> None:
    try:
        said = str(config.parse(text.encode(), "other.yaml", strict=strict).warnings)
    except ConfigError as error:
        said = str(error)
    assert "other.yaml, line " in said
    assert "secret" not in said


REFUSED = [
    ("version: v2", 1, "version: must be v1, not 'v2'"),
    ("\nversion: 1", 2, "version: must be v1, not the number 1"),
    ("- a", 1, "the file: must be a mapping with keys such as version, flags, "),
    ("flags: []", 1, "flags: must be a mapping, not a list"),
    ("flags:\n  migStrategy: 5", 2, "flags.migStrategy: must be text, not the number 5"),
    ("flags:\n  migStrategy: both", 2, "flags.migStrategy: unknown value 'both'. Allowed: none, single, mixed"),
    ("flags:\n  failOnInitError: 'true'", 2, "flags.failOnInitError: must be true or false, not 'true'"),
    ("flags:\n  plugin:\n    deviceIDStrategy: name", 3, "flags.plugin.deviceIDStrategy: unknown value 'name'. Allowed: uuid, index"),
    ("flags:\n  plugin:\n    deviceListStrategy: envvar,cdi-cri", 3, "unknown value 'envvar,cdi-cri'"),
    ("flags:\n  plugin:\n    deviceListStrategy: []", 3, "the list is empty. Allowed: envvar"),
    ("flags:\n  plugin:\n    deviceListStrategy: [1]", 3, "deviceListStrategy[0]: must be text, not the number 1"),
    ("flags:\n  deviceDiscoveryStrategy: tegra", 2, "tegra (the GPUs of Jetson boards) is not supported"),
    ("imex:\n  channelIDs: [1]", 2, "imex.channelIDs: [1]: only IMEX channel 0 can be given to containers"),
    ("sharing:\n  mps: {resources: [{name: gpu, replicas: 2}]}", 2, "sharing.mps: MPS is not supported"),
    ("sharing:\n  timeSlicing:", 2, "'resources:' is missing or empty"),
    (slicing("resources: {}"), 3, "sharing.timeSlicing.resources: must be a list, not a mapping"),
    (resources("{replicas: 2}"), 4, "resources[0]: the key 'name' is missing"),
    (resources("{name: gpu}"), 4, "resources[0]: the key 'replicas' is missing"),
    (resources("name: gpu\n      replicas: 1"), 5, "resources[0].replicas: must be 2 to 65536, not 1"),
    (resources("{name: gpu, replicas: 65537}"), 4, "must be 2 to 65536, not 65537"),
    (resources("{name: gpu, replicas: 2.5}"), 4, "replicas: must be a whole number, not the number 2.5"),
    (resources("{name: , replicas: 2}"), 4, "name: must be text, not nothing"),
    (resources("{name: -gpu, replicas: 2}"), 4, "After the slash"),
    (resources("{name: gpu, replicas: 2, devices: some}"), 4, "devices: must be all, a count, or a list"),
    (resources(f"{{name: {'x' * 57}, replicas: 2}}\n    renameByDefault: true"), 4, "1 to 63"),
    (slicing("{renameByDefault: 1, resources: []}"), 3, "renameByDefault: must be true or false, not the number 1"),
    (resources("{name: a, replicas: 2, rename: c}\n    - {name: b, replicas: 2, rename: c}") + "gateway: {honourResourceNames: true}", 2, "two resources have the name nvidia.com/c"),
    ("gateway: {honourResourceNames: true}\nresources: {gpus: [{name: a}]}", 2, "gpus[0]: the key 'pattern' is missing"),
    ("gateway: {honourResourceNames: true}\nresources: []", 2, "resources: must be a mapping, not a list"),
    ("gateway: {honourResourceNames: 1}", 1, "gateway.honourResourceNames: must be true or false"),
    ("gateway: {healthRecovery: on}", 1, "gateway.healthRecovery: must be text, not true"),
    ("gateway: {excludeDevices: [true]}", 1, "gateway.excludeDevices: must be a list of texts and whole numbers"),
    ("gateway: {devices: [{paths: [/dev/fuse]}]}", 1, "gateway.devices[0]: the key 'resource' is missing"),
    ("gateway: {devices: [{resource: x.io/a}]}", 1, "gateway.devices[0]: the key 'paths' is missing"),
    ("gateway: {devices: [{resource: a, paths: [/dev/fuse]}]}", 1, "gateway.devices[0]: the resource name 'a' has no domain"),
    ("gateway: {devices: [{resource: x.io/a, paths: [/etc/passwd]}]}", 1, "x.io/a has the path '/etc/passwd'. Write one below /dev"),
    ("gateway: {devices: [{resource: x.io/a, paths: /dev/fuse}]}", 1, "devices[0].paths: must be a list, not '/dev/fuse'"),
    ("gateway: {devices: [{resource: x.io/a, paths: [/dev/fuse], count: 0}]}", 1, "x.io/a has the count 0. Allowed: 1 to"),
    ("gateway: {devices: [{resource: x.io/a, paths: [/dev/fuse], permissions: x}]}", 1, "x.io/a has the permissions 'x'. Allowed: r, w and m"),
    ("flags: [", 2, "not YAML"),
    ("a: &x [*x]", 1, "no value above has the name after '*'"),
    ("a: {<<: 1}", 1, "only a mapping can be merged"),
    ("? [1]\n: 2", 1, "a key must be a word"),
    ("a: \x00", 1, "not YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "says"), REFUSED)
def test_what_is_wrong_is_refused_by_name_and_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        policy(text)
    assert str(refused.value).startswith(f"c.yaml, line {line}: ")
    assert says in str(refused.value)


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "a0: &a0 []\n" + "".join(f"a{level + 1}: &a{level + 1} [*a{level}]\n" for level in range(40))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(BOMB.encode(), "more than 50000 values", id="aliases"),
        pytest.param(b"[" + b"1," * 60_000 + b"]", "more than 50000 values", id="items"),
        pytest.param(b"[" * 500_000, "more than 32 levels", id="lists"),
        pytest.param(b"{a: " * 200_000, "more than 32 levels", id="mappings"),
        pytest.param(b"- " * 500_000, "more than 32 levels", id="blocks"),
        pytest.param(DEEP.encode(), "more than 32 levels", id="levels by aliases"),
        pytest.param(b"#" * (document.MAX_BYTES + 1), "more than 1048576 bytes", id="bytes"),
        pytest.param(b"a: \xff", "not YAML", id="no UTF-8"),
    ],
)  # fmt: skip
def test_it_is_bounded(content: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.parse(content, "c.yaml")


def test_a_number_of_a_million_digits_is_text() -> None:
    node = document.read(b"9" * 1_000_000, "c.yaml")
    assert isinstance(node.value, str)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=20
)


@settings(max_examples=150, deadline=None)
@given(value=VALUES)
def test_what_is_written_is_read(value: object) -> None:
    text = yaml.safe_dump(value, allow_unicode=True, default_style='"')  # its plain 'y' is a text, Go's isn't
    assert document.read(text.encode(), "c.yaml").plain() == value


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=64) | st.text("&*a:[]{}<!|>-?\n 1\"'#,%", max_size=64).map(str.encode))
def test_whatever_comes_it_is_a_file_or_an_error(content: bytes) -> None:
    try:
        config.policy(config.parse(content, "c.yaml"), {}, "auto")
    except ConfigError as error:
        assert str(error).startswith("c.yaml")  # noqa: PT017 - either way is right


def test_reading_takes_plain_files_only(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    with pytest.raises(config.UnreadableConfigError, match="No such file"):
        config.read(file)
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="plain file"):
        config.read(file)
    file.unlink()
    file.mkdir()
    before = descriptors(os.getpid())
    with pytest.raises(config.UnreadableConfigError, match="directory"):
        config.read(file)
    assert not descriptors(os.getpid()) - before
    file.rmdir()
    file.write_bytes(b"x" * (document.MAX_BYTES + 9))
    assert len(config.read(file)) == document.MAX_BYTES + 1
