"""`scripts/sanitize_gpu.sh` with stand-ins for the GPU's tools: what it takes for clean, for found and for not seen."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_cases import require

ROOT = Path(__file__).parents[1]
SEES = 'echo "========= ERROR SUMMARY: 1 error"; exit 66'
CLEAN = 'echo "1000 bytes compared with the CPU codec, 0 results differ"; echo "========= ERROR SUMMARY: 0 errors"'
RACE = 'echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"'


def sanitize(folder: Path, planted: str = SEES, clean: str = CLEAN, race: str = RACE):
    tool = folder / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*--version*) echo "Version 2025.3.1";;\n'
        f"*--plant*) {planted};;\n*racecheck*) {race};;\n*) {clean};;\nesac\n"
    )
    tool.chmod(0o755)
    environment = os.environ | {"SANITIZER": str(tool), "PYTHON": sys.executable}
    record = folder / "deep" / "record.txt"
    command = [str(ROOT / "scripts" / "sanitize_gpu.sh"), str(record)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, record.read_text() if record.exists() else done.stderr


def test_a_clean_run_is_recorded_with_its_commands(tmp_path):
    status, record = sanitize(tmp_path)
    assert status == 0, record
    for tool in ("memcheck", "initcheck", "racecheck", "synccheck"):
        assert f"$ compute-sanitizer --tool {tool} " in record
    assert "Version 2025.3.1" in record
    assert record.count("\nclean") == 4
    assert record.count("\nseen, as it must be") == 2
    assert record.rstrip().endswith("result: all clean, both planted mistakes seen")
    assert str(ROOT) not in record


@pytest.mark.parametrize(
    "behaviour",
    [
        {"planted": CLEAN},
        {"planted": "exit 66"},
        {"clean": SEES},
        {"clean": CLEAN + "; exit 1"},
        {"clean": 'echo "========= Device not supported"'},
        {"race": 'echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"; exit 66'},
        {"race": 'echo "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"'},
    ],
    ids=["not seen", "crashed", "found", "bytes differ", "no device", "race", "race warning"],
)
def test_anything_else_fails(behaviour, tmp_path):
    status, record = sanitize(tmp_path, **behaviour)
    assert status == 1
    assert "result: FAILED" in record


def test_no_tool_is_one_sentence(tmp_path):
    command = [str(ROOT / "scripts" / "sanitize_gpu.sh"), str(tmp_path / "record.txt")]
    environment = os.environ | {"SANITIZER": str(tmp_path / "missing")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "compute-sanitizer is not there" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_checked_program_agrees_on_simulated_kernels():
    require("cpu")
    found = importlib.util.find_spec("_native_cuda_sim")
    if found is None or found.origin is None:
        pytest.skip("the simulated kernels are not on the path: build _native_cuda_sim with -DFC_EVAL_TESTS=ON")
    check = [sys.executable, str(ROOT / "cuda_ext" / "tests" / "gpu_check.py")]
    check += ["--every", "31", "--simulated", str(Path(found.origin).parent)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 results differ" in done.stdout
