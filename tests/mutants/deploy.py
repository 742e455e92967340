"""What makes the image, and the machine that a whole node is tested on."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "I1": "the same files are the same layer, whoever packs them and whenever",
    "I2": "a runtime finds the name in the archive",
    "I3": "what goes into the image is read strictly, and what licences ask to go along stays",
    "I4": "a command of the image listens to no variable of Python's",
    "I5": "packages are those of this machine's own mirrors of Debian, security updates among them, or it is told why not",
    "I6": "a machine that is a node, or holds another one of ours, gets none",
}

_IMAGE = "tests/lab/test_image.py"
_DEBIAN = "tests/lab/test_debian.py"
_NODE = "tests/lab/test_node.py"

MUTANTS = (
    Mutant(
        "I1",
        "the times are those of the machine",
        "tools/image/archive.py",
        "            info.mtime = when\n",
        "            info.mtime = int(path.lstat().st_mtime)\n",
        f"{_IMAGE}::test_the_same_files_are_the_same_layer_whenever_and_however_they_were_written",
    ),
    Mutant(
        "I1",
        "the modes are those of the machine",
        "tools/image/archive.py",
        "0o755 if mode & stat.S_IXUSR else 0o644",
        "mode & 0o777",
        f"{_IMAGE}::test_the_same_files_are_the_same_layer_whenever_and_however_they_were_written",
    ),
    Mutant(
        "I2",
        "a tag and no name",
        "tools/image/archive.py",
        '"io.containerd.image.name": f"{name}:{tag}"',
        '"io.containerd.image.name": tag',
        f"{_IMAGE}::test_runtimes_find_the_name_in_an_archive",
    ),
    Mutant(
        "I3",
        "licences go with the documentation",
        "tools/image/contents.py",
        'fnmatchcase(path, "usr/share/doc/*/copyright") or ',
        "",
        f"{_IMAGE}::test_what_is_left_out",
    ),
    Mutant(
        "I3",
        "a word that nobody knows is passed over",
        "tools/image/contents.py",
        "frozen=True, forbid_unknown_fields=True",
        "frozen=True",
        f"{_IMAGE}::test_a_wrong_list_of_contents_is_told",
    ),
    Mutant(
        "I4",
        "PYTHONPATH reaches the daemon",
        "tools/image/python.py",
        "{python} -I\\n",
        "{python}\\n",
        f"{_IMAGE}::test_a_command_listens_to_no_python_variable",
    ),
    Mutant(
        "I5",
        "any vendor is Debian",
        "gateway/lab/debian.py",
        'if origin == "Debian" and component',
        "if component",
        f"{_DEBIAN}::test_the_machines_mirrors_of_debian_serve_the_wanted_release",
    ),
    Mutant(
        "I5",
        "apt without lists is a machine without mirrors",
        "gateway/lab/debian.py",
        "if not targets.strip():",
        "if False:",
        f"{_DEBIAN}::test_apt_without_lists_is_told_apart_from_a_machine_without_mirrors",
    ),
    Mutant(
        "I5",
        "an image without security updates",
        "tools/image/debian.py",
        'if not any(suite.endswith("-security") for _, suite in served):',
        "if not served:",
        f"{_DEBIAN}::test_an_image_without_security_updates_is_not_made",
    ),
    Mutant(
        "I6",
        "a kubelet makes no node",
        "gateway/lab/node/machine.py",
        '_NODES = {"kubelet", ',
        "_NODES = {",
        f"{_NODE}::test_a_kubelet_makes_a_machine_a_node_and_a_device_manager_of_ours_does_not",
    ),
    Mutant(
        "I6",
        "two nodes at once",
        "gateway/lab/node/machine.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        f"{_NODE}::test_a_second_node_is_told_whose_the_first_is",
    ),
)
