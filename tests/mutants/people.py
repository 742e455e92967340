"""People: what someone is told who uses it for the first time."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "Q1": "a typing error in --socket-dir is told, again and again, and no folder is made of it",
    "Q2": "the emulated kubelet warns before it forgets who holds which devices",
    "Q3": "a matrix runs on the kubelets that were asked for, and only where its report can be kept",
    "Q4": "who wants no colours gets none",
    "Q5": "another project's package in the place of ours is recognised before anything is imported, and named",
}

MUTANTS = (
    Mutant(
        "Q1",
        "a typing error is made a folder",
        "gateway/handover/instance.py",
        "    if folder.name == SOCKET_DIR.name:\n",
        "    if folder.name:\n",
        "tests/unit/test_instance.py::test_the_socket_directory_is_made_only_where_a_kubelet_would",
    ),
    Mutant(
        "Q1",
        "what keeps it waiting is said once",
        "gateway/folder.py",
        "tell_at = now + FOLDER_TOLD",
        "tell_at = now + 10**9",
        "tests/unit/test_serve.py::test_what_keeps_it_waiting_is_said_again_and_again",
    ),
    Mutant(
        "Q2",
        "who holds nothing is forgotten, too",
        "gateway/cli/dev.py",
        "if not holders or before == after or",
        "if before == after or",
        "tests/unit/test_emulated_process.py::test_a_hop_that_forgets_pods_is_told",
    ),
    Mutant(
        "Q2",
        "nobody is warned",
        "gateway/cli/dev.py",
        "            self.say(lost)\n",
        "            pass\n",
        "tests/unit/test_emulated_process.py::test_a_restart_says_who_is_forgotten",
    ),
    Mutant(
        "Q3",
        "a version that nobody knows is taken for the newest",
        "gateway/cli/compat.py",
        "for one in found if not one.certain]",
        "for one in found if one.minor < 8]",
        "tests/unit/test_matrix.py::test_a_wrong_option_is_told_what_was_expected",
    ),
    Mutant(
        "Q3",
        "what isn't built is emulated",
        "gateway/cli/runs.py",
        '        if genuine == "built" and asked:\n',
        "        if False and asked:\n",
        "tests/unit/test_matrix.py::test_a_wrong_option_is_told_what_was_expected",
    ),
    Mutant(
        "Q3",
        "the report's folder is looked at last",
        "gateway/cli/compat.py",
        "    runs.see_that_it_can_be_written(out, page)\n",
        "",
        "tests/unit/test_matrix.py::test_a_report_that_cannot_be_kept_is_told_before_the_run",
    ),
    Mutant(
        "Q4",
        "the log is coloured all the same",
        "gateway/wires/log.py",
        "colors=sys.stderr.isatty() and wants_colour()",
        "colors=sys.stderr.isatty()",
        "tests/unit/test_cli_status.py::test_who_wants_no_colours_gets_none",
    ),
    Mutant(
        "Q4",
        "commands are coloured all the same",
        "gateway/cli/main.py",
        "        ctx.color = False\n",
        "        pass\n",
        "tests/unit/test_cli_status.py::test_who_wants_no_colours_gets_none",
    ),
    Mutant(
        "Q4",
        "an empty NO_COLOR counts",
        "gateway/wires/log.py",
        'not os.environ.get("NO_COLOR")',
        '"NO_COLOR" not in os.environ',
        "tests/unit/test_cli_status.py::test_who_wants_no_colours_gets_none",
    ),
    Mutant(
        "Q5",
        "a package that was merged into ours is taken for it",
        "gateway/cli/environment.py",
        " or PROJECT.encode() not in origin.read_bytes():",
        ":",
        "tests/unit/test_environment.py::test_whose_packages_they_are",
    ),
    Mutant(
        "Q5",
        "a package from elsewhere is taken for ours",
        "gateway/cli/environment.py",
        "if origin is None or origin.parents[1] != ours or",
        "if origin is None or not ours or",
        "tests/unit/test_environment.py::test_whose_packages_they_are",
    ),
    Mutant(
        "Q5",
        "the rest is imported first",
        "gateway/cli/__init__.py",
        "environment.require()\n",
        "from gateway.cli import main\n\nenvironment.require()\n",
        "tests/unit/test_environment.py::test_whose_packages_they_are",
    ),
)
