"""The architecture as a test: imports go one way, files stay small, what the README names exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fc_eval.errors import FcEvalError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fc_eval"
LINE_LIMIT = 300

# A room may import the rooms named here, itself, `errors` and `settings`. What composes knows all.
MAY_IMPORT = {
    "wire": set(),
    "codec": {"wire"},
    "collective": {"codec", "wire"},
    "models": {"results.fingerprint"},
    "weights": set(),
    "parallel": {"collective", "codec", "wire", "weights"},
    "evaluate": set(),
    "results": {"wire"},
    "report": {"results", "presets", "experiment", "cost", "collective.comm"},
    "predict": {"collective", "cost", "models.config", "models.shape", "presets", "results", "report", "bench.options"},
    "sweep": {
        *("collective.comm", "config", "evaluate.calibration", "evaluate.sources", "job", "launch", "machine"),
        *("models", "parallel.site", "results"),
    },
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_go_one_way(room):
    allowed = {room, "errors", "settings", *MAY_IMPORT[room]}
    for path in (PACKAGE / room).rglob("*.py"):
        for module in _imports(path):
            if module.startswith("fc_eval."):
                inner = module.removeprefix("fc_eval.")
                assert any(inner == a or inner.startswith(a + ".") for a in allowed), f"{path} imports {module}"


def test_nothing_knows_the_commands_but_the_command_line():
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(module.startswith("fc_eval.commands") for module in _imports(path))
    }
    assert importers == {"cli.py"}


def test_lm_eval_is_imported_where_tasks_are_run_only():
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(module.split(".")[0] == "lm_eval" for module in _imports(path))
    }
    assert importers == {
        "evaluate/definitions.py",
        "evaluate/scoring_lm.py",
        "evaluate/tasks.py",
        "lm_eval_model.py",
    }


@pytest.mark.parametrize("room", ["results", "report", "wire", "predict"])
def test_room_never_imports_torch(room):
    for path in (PACKAGE / room).rglob("*.py"):
        assert not any(module.split(".")[0] == "torch" for module in _imports(path)), path


def test_parent_of_a_sweep_loads_no_torch():
    modules = "fc_eval, fc_eval.cli, fc_eval.commands.run, fc_eval.sweep.execute"
    code = f"import sys; import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_are_small():
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    files += [p for p in (ROOT / "cuda_ext").rglob("*") if p.suffix in {".h", ".cuh", ".cu", ".cpp"}]
    long = {p.relative_to(ROOT).as_posix(): n for p in files if (n := len(p.read_text().splitlines())) > LINE_LIMIT}
    assert not long


def test_readme_paths_exist():
    text = (ROOT / "README.md").read_text()
    paths = set(re.findall(r"`((?:fc_eval|conf|cuda_ext|scripts|tests|reports)/[\w./-]*)`", text))
    paths |= set(re.findall(r"\]\(([^)#:]+)\)", text))
    assert len(paths) > 5
    missing = {p for p in paths if not (ROOT / p).exists()}
    assert not missing


def test_readme_make_targets_and_commands_exist():
    from fc_eval.cli import USAGE

    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", text, re.M))
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    commands = set(re.findall(r"fc-eval (\w+)", text))
    assert "run" in commands
    assert all(re.search(rf"^  {command} ", USAGE, re.M) for command in commands), commands


def test_native_build_flags_forbid_contraction():
    cmake = ROOT / "cuda_ext" / "CMakeLists.txt"
    if not cmake.exists():
        pytest.skip("the native codec is not part of this tree")
    text = cmake.read_text()
    assert "-ffp-contract=off" in text
    assert "-fmad=false" in text
    assert "fast-math" not in text.replace("no fast-math", "").replace("never fast-math", "")


def test_readme_tables_are_what_their_sources_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from readme_table import with_tables

    text = (ROOT / "README.md").read_text()
    assert with_tables(text, ROOT) == text
    with pytest.raises(FcEvalError, match="the tables first: expected each of first, allreduce once"):
        with_tables(text.replace("<!-- /allreduce-table -->", ""), ROOT)
