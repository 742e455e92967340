"""AMD's GPUs: what sysfs and the metrics exporter say, and what they don't."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "V1": "AMD's device IDs are those of its own plugin, whichever kernel module names the partitions",
    "V2": "a partition that KFD doesn't know is none, and the others belong to the GPU at their own place",
    "V3": "what can't be read is that GPU's trouble, and it stays listed as it was",
    "V4": "AMD's GPUs stay listed, unhealthy, while the driver is gone or hangs, which costs one thread",
    "V5": "no file of sysfs leads out of it, blocks or is too big",
    "V6": "links count for what they are: XGMI with its lanes, PCIe by NUMA node",
    "V7": "KFD's topology is read again when it changed, and only then",
    "V8": "only the exporter's word 'unhealthy' counts, for five minutes when it is away",
    "V9": "a released GPU is left out until it is acquired",
}

_TEST = "tests/unit/test_gpu_amd.py"
_AMD = "devices/gpu/amd.py"
_EXPORTER = "devices/gpu/amd_exporter.py"

MUTANTS = (
    Mutant("V1", "Linux's partitions are overlooked", _AMD, 'r"amdgpu_xcp[._][0-9]', 'r"amdgpu_xcp_[0-9]', _TEST),
    Mutant(
        "V2",
        "spare partitions are offered",
        _AMD,
        """        if (node := by_render.get(part.render or 0)) is not None:
            partitions""",
        """        if (node := by_render.get(part.render or 0, tree.topology.nodes[-1])) is not None:
            partitions""",
        _TEST,
    ),
    Mutant(
        "V2",
        "the domain doesn't count",
        _AMD,
        "(whole.domain, whole.location >> 3) == (node.domain, node.location >> 3)",
        "whole.location >> 3 == node.location >> 3",
        _TEST,
    ),
    Mutant(
        "V2", "the first function takes all", _AMD, 'max(near, default=(0, ""))', 'min(near, default=(0, ""))', _TEST
    ),
    Mutant(
        "V3",
        "a GPU that KFD doesn't know is well",
        _AMD,
        "    if node is not None:\n        return None\n    unread",
        "    if node is None:\n        return None\n    unread",
        _TEST,
    ),
    Mutant("V3", "an odd mode is a name", _AMD, "if not _MODE.fullmatch(one)", "if not _MODE", _TEST),
    Mutant(
        "V3",
        "partitions go with a GPU that can't be read",
        _AMD,
        "for gpu in before if gpu.board in troubles]",
        "for gpu in before if gpu.uuid in troubles]",
        _TEST,
    ),
    Mutant(
        "V4",
        "GPUs are well without a driver",
        _AMD,
        "replace(gpu, trouble=Trouble(str(error))) for gpu in self._seen",
        "replace(gpu, trouble=None) for gpu in self._seen",
        _TEST,
    ),
    Mutant("V4", "each look at a hanging driver costs a thread", _AMD, "if self._reading is None:", "if True:", _TEST),
    Mutant("V4", "a hanging driver is waited for", _AMD, "asyncio.timeout(_PATIENCE_S)", "asyncio.timeout(9)", _TEST),
    Mutant(
        "V5", "links out of sysfs are followed", _AMD, "if not folder.is_relative_to(root):", "if not folder:", _TEST
    ),
    Mutant("V5", "links in place of files are followed", _AMD, "os.O_RDONLY | os.O_NOFOLLOW |", "os.O_RDONLY |", _TEST),
    Mutant("V5", "a pipe is read", _AMD, "if not stat.S_ISREG(", "if stat.S_ISBLK(", _TEST),
    Mutant("V5", "a huge file is read", _AMD, "if len(text) > _TEXT:", "if not _TEXT:", _TEST),
    Mutant("V5", "folders have no end", _AMD, "itertools.islice(fit, _ENTRIES)", "itertools.islice(fit, None)", _TEST),
    Mutant(
        "V6", "PCIe is taken for XGMI", _AMD, "Way.XGMI if wire.kind == _XGMI else", "Way.XGMI if wire.kind else", _TEST
    ),
    Mutant("V6", "lanes don't count", _AMD, "wire.lanes if way is Way.XGMI else 1", "1", _TEST),
    Mutant(
        "V6",
        "two unknown places are one",
        _AMD,
        "entry.numa_node is not None and entry.numa_node ==",
        "entry.numa_node ==",
        _TEST,
    ),
    Mutant(
        "V7",
        "a new generation is overlooked",
        _AMD,
        "return (generation, inode, *(",
        "return (bool(generation), inode, *(",
        _TEST,
    ),
    Mutant(
        "V7",
        "a newly loaded driver is overlooked",
        _AMD,
        "return (generation, inode, *(",
        "return (generation, *(",
        _TEST,
    ),
    Mutant("V7", "the topology is read each time", _AMD, "topology = last if known else ", "topology = ", _TEST),
    Mutant("V7", "a topology that could not be read is kept", _AMD, " and not last.problem", "", _TEST),
    Mutant(
        "V7",
        "half a change is believed",
        _AMD,
        "if tree.topology.key == _key(kfd, tree.whole):",
        "if tree:",
        _TEST,
    ),
    Mutant("V8", "an unknown health is none", _EXPORTER, '.lower() == b"unhealthy"', '.lower() != b"healthy"', _TEST),
    Mutant("V8", "the last word counts for ever", _EXPORTER, "or now >= self._heard + _KEPT_S", "", _TEST),
    Mutant(
        "V8",
        "an exporter that is away has said nothing",
        _EXPORTER,
        "    def _say_silent(self, reason: str) -> None:\n",
        "    def _say_silent(self, reason: str) -> None:\n        self._ill = frozenset()\n",
        _TEST,
    ),
    Mutant("V8", "silence is said each time", _EXPORTER, "if not self._silent:", "if True:", _TEST),
    Mutant("V8", "an answer may be of any size", _EXPORTER, "1 << 20)", "-1)", _TEST),
    Mutant("V9", "a released GPU is looked at", _AMD, "if gpu.board not in self._released", "if gpu.board", _TEST),
)
