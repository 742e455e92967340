"""People: what someone is told who uses it for the first time."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "Q1": "a typing error in --socket-dir is told, again and again, and no folder is made of it",
}

MUTANTS = (
    Mutant(
        "Q1",
        "a typing error is made a folder",
        "gateway/instance.py",
        "    if folder.name == SOCKET_DIR.name:\n",
        "    if folder.name:\n",
        "tests/unit/test_instance.py::test_the_socket_directory_is_made_only_where_a_kubelet_would",
    ),
    Mutant(
        "Q1",
        "what keeps it waiting is said once",
        "gateway/shell.py",
        "tell_at = now + FOLDER_TOLD",
        "tell_at = now + 10**9",
        "tests/unit/test_serve.py::test_what_keeps_it_waiting_is_said_again_and_again",
    ),
)
