"""A command of many jobs: each run is tried once, one job's failure is its own, and whatever stops it is said."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fc_eval.cli import main
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError, Terminated
from fc_eval.launch import USER_ERROR_EXIT, sigterm_raises
from fc_eval.results import files
from fc_eval.results import store as stores
from fc_eval.results.store import RunFolder, RunStore
from fc_eval.sweep import child, planned_run
from fc_eval.sweep import plan as planning
from fc_eval.sweep.child import Ending, Seat, child_environment
from fc_eval.sweep.execute import execute, planned, summarize
from fc_eval.sweep.plan import plan
from fc_eval.sweep.planned_run import Outcome

ROOT = Path(__file__).parents[1]
TINY = ["model=tiny", "tp=2", "eval=text", "eval.limit=2", "eval.runs.text.window_tokens=64", "threads=1", "device=cpu"]

ANY_TP = [override for override in TINY if not override.startswith("tp=")]


@pytest.fixture
def children(monkeypatch):
    """Runs that end at once, as `ends` says of their comm (done: None); a list of those that were started."""
    started: list[str] = []

    def run(folder: RunFolder, seat: Seat) -> Ending:
        name = folder.path.name.split("-")[1]
        started.append(name)
        return ends.get(name, Ending(1, 0.5, "it failed"))

    ends: dict[str, Ending] = {}
    monkeypatch.setattr(planned_run, "run_child", run)
    started_and_ends = started, ends
    return started_and_ends


def run_main(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["run", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_failed_run_is_tried_again_and_a_mistake_is_not(tmp_path, capsys, children):
    started, ends = children
    common = ["comm=fp32_ordered", "tp=2", *ANY_TP, "retries=2"]
    status, out, _ = run_main(capsys, *common, f"out={tmp_path / 'a'}")
    assert status == 1
    assert started == ["fp32_ordered"] * 3
    assert "failed, retry 1 of 2: it failed" in out
    assert "runs: 1 failed" in out
    started.clear()
    ends["fp32_ordered"] = Ending(USER_ERROR_EXIT, 0.5, "tp=7 does not divide")
    assert run_main(capsys, *common, f"out={tmp_path / 'b'}")[0] == 2
    assert started == ["fp32_ordered"]
    assert "retries=-1 is not possible" in run_main(capsys, *common, "retries=-1", f"out={tmp_path / 'c'}")[2]


def test_a_failing_baseline_is_tried_once_in_a_sweep(tmp_path, capsys, children):
    status, out, _ = run_main(capsys, "-m", "comm=int8,int4", "tp=2,4", *ANY_TP, f"out={tmp_path / 'runs'}")
    assert status == 1
    assert children[0] == ["fp32_ordered", "fp32_ordered"]  # one for each tp
    assert out.count("its baseline tiny-fp32_ordered") == 4
    assert "runs: 6 failed" in out


def test_a_run_that_is_named_twice_is_tried_once(tmp_path, capsys, children):
    run_main(capsys, "-m", "comm=fp32_ordered,fp32_ordered", *TINY, f"out={tmp_path / 'runs'}")
    assert children[0] == ["fp32_ordered"]


def test_a_dry_run_lists_each_run_once_and_leaves_no_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run_main(capsys, "-m", "comm=int8,int4", *TINY, "out=deep/runs", "dry_run=true")
    assert status == 0
    assert [line.split("-")[1] for line in out.splitlines() if "would run" in line] == ["fp32_ordered", "int8", "int4"]
    assert "runs: 3 planned" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["null", "[]", "", "{"])
@pytest.mark.parametrize("name", ["status.json", "config.yaml", "result.json"])
def test_broken_folders_of_a_store_are_named_and_stop_nothing(tmp_path, capsys, name, content):
    folder = RunFolder(tmp_path / "runs" / "other-run-0123456789", "0" * 64)
    folder.set_status("done")
    folder.write_config({"config": {"eval": {"specs": []}}})
    folder.write_result({})
    (folder.path / name).write_text(content)
    status, out, err = run_main(capsys, "comm=int4", *TINY, f"out={tmp_path / 'runs'}", "dry_run=true")
    assert status == 0
    assert out.count("would run, time unknown") == 2
    assert ("broken: other-run-0123456789: " + name in out) == (name != "result.json")  # results are for reports
    assert err == ""


def test_a_mistake_that_only_the_run_finds_is_status_2(tmp_path, capsys, children):
    children[1]["fp32_ordered"] = Ending(USER_ERROR_EXIT, 0.5, "the tokenizer has no BOS token")
    status, out, _ = run_main(capsys, "-m", "comm=int8,int4", *TINY, f"out={tmp_path / 'runs'}")
    assert status == 2
    assert "the tokenizer has no BOS token" in out


def test_a_mistake_that_shows_from_the_settings_stops_its_own_job_alone(tmp_path, capsys, children):
    status, out, err = run_main(capsys, "-m", "comm=int8", "tp=7,4", *ANY_TP, f"out={tmp_path / 'runs'}")
    assert status == 1
    assert children[0] == ["fp32_ordered"]
    assert "error: tp=7 does not divide" in err
    assert "not run: tp=7 does not divide" in out


def test_a_defect_that_one_job_meets_does_not_end_the_others(tmp_path, capsys, children, monkeypatch):
    def contents(config):
        if config.tp == 2:
            raise RuntimeError("nobody thought of this")
        return found(config)

    found = planning.contents
    monkeypatch.setattr(planning, "contents", contents)
    status, out, err = run_main(capsys, "-m", "comm=int8", "tp=2,4", *ANY_TP, f"out={tmp_path / 'runs'}")
    assert status == 1
    assert children[0] == ["fp32_ordered"]
    assert "not run: RuntimeError: nobody thought of this; this is a defect of fc-eval" in out
    assert "Traceback" in err


def test_a_disk_that_is_full_fails_the_run_with_path_and_reason(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(child.subprocess, "Popen", full)
    status, out, _ = run_main(capsys, "comm=fp32_ordered", *TINY, f"out={tmp_path / 'runs'}")
    assert status == 2
    assert f"{tmp_path}/runs/tiny-fp32_ordered" in out
    assert "No space left on device (ENOSPC): free some space" in out


def test_errors_of_files_name_the_real_path_and_not_out(tmp_path, capsys):
    own = ["model=tiny", "tp=2", "eval=[]", f"eval.tasks=[{tmp_path}/none.yaml]"]
    status, _, err = run_main(capsys, *own, f"out={tmp_path / 'runs'}")
    assert status == 2
    assert "none.yaml" in err
    assert "does not exist" in err
    assert "out=" not in err
    (tmp_path / "file").write_text("")
    status, _, err = run_main(capsys, *TINY, f"out={tmp_path / 'file' / 'runs'}")
    assert status == 2
    assert f"{tmp_path}/file" in err
    assert "Not a directory (ENOTDIR)" in err
    assert "choose another folder with out=DIR" in err


def test_waiting_for_another_process_is_said_once(tmp_path, children):
    store = RunStore(tmp_path / "runs")
    store.prepare()
    target = plan(compose_one([*TINY, "comm=fp32_ordered"]))
    said: list[str] = []
    with store.lock(target.fingerprint, lambda: None):
        waiting = threading.Thread(target=lambda: execute(target.config, store, say=said.append))
        waiting.start()
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [line.split(": ")[1] for line in said] == ["waiting for another process that computes it"]
        assert children[0] == []
    waiting.join()
    assert children[0] == ["fp32_ordered"]
    name = store.folder(target.name, target.fingerprint).path.name
    assert said[1:] == [f"> {name}", f"! {name}: failed: it failed (1 of 1)"]


@pytest.mark.parametrize("file", ["status.json", "config.yaml"])
def test_a_run_that_has_just_begun_is_not_said_to_be_broken(tmp_path, children, monkeypatch, file):
    store, said = RunStore(tmp_path / "runs"), []
    store.prepare()
    (run,) = planned(compose_one([*TINY, "comm=fp32_ordered"]), store)
    beside = Outcome("failed", store.folder("other", "f" * 64), error="it failed")

    def another_command_looks() -> None:
        assert not run.is_done(said.append)
        summarize([beside], said.append)

    def write_and_look(path: Path, data: bytes) -> None:
        write_atomic(path, data)
        if path.name == file:
            another_command_looks()

    write_atomic = files.write_atomic
    for module in (files, stores):
        monkeypatch.setattr(module, "write_atomic", write_and_look)
    assert run(say=lambda text: None).error == "it failed"
    assert said  # it has looked
    assert [line for line in said if "broken" in line] == []


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["comm=int4"], "tiny-int4-g128-tp2-text"),
        (["comm=int4_int8", "comm.group_size=32"], "tiny-int4_int8-g32-tp2-text"),
        (["comm.reduce=int4-g32", "comm.gather=int8-g64"], "tiny-int4_int8-g32-g64-tp2-text"),
        (["comm.reduce=int4-gtoken", "comm.gather=int4-g64-sym"], "tiny-int4_int4-sym-gtoken-g64-tp2-text"),
        (["comm=plain", "policy=o_proj_int8"], "tiny-plain-o_proj_int8-tp2-text"),
    ],
)
def test_a_folder_is_named_after_what_differs(overrides, name):
    assert plan(compose_one([*TINY, *overrides])).name == name


# -- the child's environment ---------------------------------------------------------------------------------------


def test_a_child_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "fc_eval").mkdir()
    for name in ("torch.py", "fc_eval/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = "import fc_eval, importlib.util as u; print(fc_eval.__file__, u.find_spec('torch').origin)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert str(tmp_path) not in found.stdout
    assert str(ROOT / "fc_eval") in found.stdout


def test_a_child_of_a_source_tree_finds_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "/some/where")
    assert child_environment()["PYTHONPATH"] == f"{ROOT}{os.pathsep}/some/where"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(ROOT)
    monkeypatch.chdir(ROOT / "tests")
    assert "PYTHONPATH" not in child_environment()


# -- heartbeat -----------------------------------------------------------------------------------------------------


class Beats:
    """Stands for the event that ends the heart: `count` beats, none of them waited for."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wait(self, timeout: float) -> bool:
        self.left -= 1
        return self.left < 0


def test_the_heart_beats_on_after_writes_that_failed(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run", "0" * 64)
    folder.set_status("running", child=None)
    tries: list[int] = []

    def full_at_first(handle: int) -> None:
        tries.append(handle)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_at_first)
    child._heartbeat(folder, 4711, Beats(2))
    assert folder.status()["child"] is None
    assert [path.name for path in folder.path.iterdir()] == ["status.json"]  # nothing half-written stays
    child._heartbeat(folder, 4711, Beats(1))
    assert (len(tries), folder.status()["child"], folder.status()["state"]) == (3, 4711, "running")
    monkeypatch.setattr(RunFolder, "set_status", lambda *_, **__: folder.path.joinpath("none").stat())
    child._heartbeat(folder, 4711, Beats(1))


# -- signals -------------------------------------------------------------------------------------------------------


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_sigterm_raises_in_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), sigterm_raises():
        stop_this_process()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("number", "status", "reason", "processes"),
    [
        (signal.SIGTERM, 143, "stopped by SIGTERM", 1),
        (signal.SIGTERM, 143, "stopped by SIGTERM", 2),
        (signal.SIGINT, 130, "stopped by the user", 1),
    ],
)
def test_a_stopped_parent_ends_its_child_and_says_so(tmp_path, number, status, reason, processes):
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        f"if 'fc_eval.run' in ' '.join(sys.orig_argv) and ({processes} == 1 or 'RANK' in os.environ):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"  # one write: lines of two processes do not mix
        "    time.sleep(600)\n"
    )
    runs, temporary = tmp_path / "runs", tmp_path / "tmp"
    temporary.mkdir()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fc_eval.cli",
            "run",
            "comm=fp32_ordered",
            *TINY,
            f"processes={processes}",
            f"out={runs}",
        ],
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert parent.stderr is not None
    started = int(parent.stderr.readline())
    parent.send_signal(number)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode == status
    assert err.splitlines()[-1] == "stopped; finished evaluations are kept, and the same command goes on after them"
    (file,) = runs.glob("*/status.json")
    found = json.loads(file.read_text())
    assert (found["state"], found["error"]) == ("failed", reason)
    assert list(temporary.glob("fc_eval_*")) == []
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)


def test_a_lock_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / ".locks").write_text("")
    with pytest.raises(FcEvalError, match=r"\.locks.* \((ENOTDIR|EEXIST)\)"), RunStore(tmp_path).lock("0" * 64, print):
        pass
