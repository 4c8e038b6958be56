"""Runs side by side, by every launcher: what fails, is killed or stopped leaves the others alone, and is taken up."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fc_eval import machine
from fc_eval.cli import main
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.job import Job
from fc_eval.machine import Room, settled, share_note
from fc_eval.results.store import RunStore
from fc_eval.sweep import launchers
from fc_eval.sweep.execute import planned
from fc_eval.sweep.launchers import check_room, launcher_of, room_of, seats
from fc_eval.sweep.optional import optional

ROOT = Path(__file__).parents[1]
TINY = ["model=tiny", "tp=2", "eval=text", "eval.limit=2", "eval.runs.text.window_tokens=64", "threads=1", "device=cpu"]
LAUNCHERS = {
    "local": [],
    "joblib": ["launcher=joblib"],
    "submitit": ["launcher=submitit", "launcher.executor=local"],
}


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Children that load no model: each does what its comm says, and INT8 and INT4 wait until both of them run."""
    folder = tmp_path / "made_up"
    (folder / "met").mkdir(parents=True)
    (folder / "mode").write_text("")
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys, time
            def meet(*names):
                open("{folder}/met/" + names[0], "w").close()
                end = time.monotonic() + 60
                while not all(os.path.exists("{folder}/met/" + name) for name in names):
                    assert time.monotonic() < end
                    time.sleep(0.01)
            if "fc_eval.run" in sys.orig_argv:
                mode = open("{folder}/mode").read()
                from pathlib import Path
                from fc_eval.launch import die_with_parent
                from run_fixtures import Run, write_run
                import yaml
                die_with_parent()
                path = Path(sys.orig_argv[-1])
                tree = yaml.safe_load((path / "config.yaml").read_text())
                comm = (tree["config"]["comm"]["reduce"] or "baseline").partition("-")[0]
                os.write(1, f"this is {{comm}}, process {{os.getpid()}}\\n".encode())
                class Same(Run):
                    fingerprint = tree["fingerprint"]
                if comm == "int8" and mode != "alone":
                    meet("int8", "int4")
                if comm == "int4" and mode != "alone":
                    meet("int4", "int8")
                if mode == "kill":
                    if comm == "int5":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if comm == "int3":
                        os.kill(os.getppid(), signal.SIGKILL)
                        os._exit(0)
                    if comm == "int2" and not os.path.exists("{folder}/met/int2"):
                        meet("int2")
                        os.kill(os.getppid(), signal.SIGUSR2)  # what a job gets that is preempted
                        time.sleep(600)
                if comm == "int7":
                    meet("int7", "int6")
                    os._exit(7)
                if comm == "int6":
                    meet("int6")
                    time.sleep(600)
                write_run(path.parent, Same(base=tree["baseline_fingerprint"]), path.name)
                os._exit(0)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}:{ROOT / 'tests'}")
    return folder / "mode"


def states(runs: Path) -> dict[str, tuple[str, str | None]]:
    found = [json.loads(path.read_text()) for path in runs.glob("*/status.json")]
    return {status["name"].split("-")[1]: (status["state"], status["error"]) for status in found}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_killed_run_leaves_those_beside_it_alone_and_is_taken_up_again(name, tmp_path, capfd, monkeypatch, made_up):
    if name != "local":
        pytest.importorskip(name)
    if name == "submitit":
        monkeypatch.setattr("submitit.Job._results_timeout_s", 0)  # what it gives a slow file system to show a result
    runs = tmp_path / "runs"
    comms = "int8,int5,int4" + (",int3,int2" if name == "submitit" else "")
    command = ["run", "-m", f"comm={comms}", *TINY, f"out={runs}", "jobs=2", *LAUNCHERS[name]]
    made_up.write_text("kill")
    assert main(command) == 1
    out, err = capfd.readouterr()
    found = states(runs)
    lost = {"int3", "int5"} & set(found)
    done = {"fp32_ordered", "int8", "int4", "int2"} & set(found)
    assert {comm: state for comm, (state, _) in found.items()} == {
        **dict.fromkeys(done, "done"),
        **dict.fromkeys(lost, "failed"),
    }
    assert found["int5"][1] == "killed by SIGKILL (the system does this when memory runs out)"
    assert f"runs: {len(done)} done" in out
    if name == "submitit":
        assert "of submitit gave no outcome" in str(found["int3"][1])
    else:
        line = next(line for line in err.splitlines() if "this is int8" in line)
        assert line.startswith("tiny-int8-g128-tp2-text-")
        assert ": this is int8" in line
    first = out.index("tiny-fp32_ordered"), out.index("done in")
    assert max(first) < out.index("tiny-int8")  # the baseline, before anything is compared with it

    made_up.write_text("alone")
    assert main(command) == 0
    assert f"runs: {len(done)} skipped, {len(lost)} done" in capfd.readouterr().out


def test_the_first_failure_stops_those_beside_it(tmp_path, capfd, made_up):
    runs = tmp_path / "runs"
    command = ["run", "-m", "comm=int6,int7,int4,int8", *TINY, f"out={runs}", "jobs=2", "fail_fast=true"]
    assert main(command) == 1
    found = states(runs)
    assert found["int7"][0] == "failed"
    assert str(found["int7"][1]).startswith("exit status 7: this is int7")
    assert found["int6"] == ("failed", "stopped, because another run failed (fail_fast=true)")
    assert found["fp32_ordered"][0] == "done"
    assert "int8" not in found or found["int8"][0] == "failed"  # it may have begun, but not ended
    assert "runs: 1 done, 1 failed" in capfd.readouterr().out


def _ignore_sigint():
    """As a script's background job does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_stopped_parent_ends_all_of_its_children(name, tmp_path, made_up):
    if name != "local":
        pytest.importorskip(name)
    runs = tmp_path / "runs"
    arguments = ["run", "-m", "comm=int6,int6-g32", *TINY, f"out={runs}", "jobs=2", *LAUNCHERS[name]]
    command = [sys.executable, "-m", "fc_eval.cli", *arguments]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=_ignore_sigint) as parent:
        end = time.monotonic() + 60
        while sum(path.read_text() != "" for path in runs.glob("*int6*/log.txt")) < 2:  # both of them run
            assert time.monotonic() < end
            time.sleep(0.05)
        parent.send_signal(signal.SIGTERM)
        _, err = parent.communicate(timeout=60)
    assert parent.returncode == 143
    assert err.splitlines()[-1] == "stopped; finished evaluations are kept, and the same command goes on after them"
    found = [json.loads(path.read_text()) for path in runs.glob("*int6*/status.json")]
    assert [each["state"] for each in found] == ["failed"] * 2
    assert all(each["error"].startswith("stopped by ") for each in found)
    pids = [int(path.read_text().rpartition(" ")[2]) for path in runs.glob("*int6*/log.txt")]
    while any(map(runs_still, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system's word on a dead parent is Linux's")
@pytest.mark.parametrize("name", ["local", "joblib"])
def test_nothing_outlives_a_killed_parent(name, tmp_path, made_up):
    if name != "local":
        pytest.importorskip(name)
    runs = tmp_path / "runs"
    arguments = ["run", "-m", "comm=int6,int6-g32", *TINY, f"out={runs}", "jobs=2", *LAUNCHERS[name]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-m", "fc_eval.cli", *arguments], **quiet) as parent:
        end = time.monotonic() + 60
        while sum(path.read_text() != "" for path in runs.glob("*int6*/log.txt")) < 2:  # both of them run
            assert time.monotonic() < end
            time.sleep(0.05)
        parent.kill()
    statuses = [json.loads(path.read_text()) for path in runs.glob("*int6*/status.json")]
    pids = [int(path.read_text().rpartition(" ")[2]) for path in runs.glob("*int6*/log.txt")]
    pids += [status["pid"] for status in statuses]  # of joblib's workers
    while any(computes(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def computes(pid: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has asked for its exit status has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_of_another_command_is_not_said_to_have_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers, "LOCK_TRIES", 0)
    (run,) = planned(compose_one([*TINY, "comm=fp32_ordered"]), RunStore(tmp_path))
    run.store.prepare()
    launchers._mark_failed(run, "stopped")
    assert not run.folder.path.exists()  # it has not begun
    run.folder.set_status("running")
    with run.store.lock(run.plan.fingerprint, lambda: None):
        launchers._mark_failed(run, "stopped")
        assert run.folder.status()["state"] == "running"
    launchers._mark_failed(run, "stopped")
    assert (run.folder.status()["state"], run.folder.status()["error"]) == ("failed", "stopped")


def runs_still(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_cpus_and_gpus_are_shared_evenly_and_a_share_that_changes_the_run_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)
    config = compose_one([*TINY, "threads=null", "comm=fp32_ordered"])
    assert [settled(config, Room(jobs=jobs)).threads for jobs in (1, 2, 3, 16)] == [8, 4, 2, 1]
    note = share_note(config, Room(jobs=2))
    assert note is not None
    assert note.startswith("threads=4 for each run")
    assert "has 8 here: give threads=N" in note
    assert share_note(replace(config, threads=3), Room(jobs=2)) is None
    assert share_note(config, Room()) is None
    (run,) = planned(config, RunStore(tmp_path), Room(jobs=2))
    assert run.plan.config.threads == 4
    assert seats([run], 2) == [{}, {}]

    for module in (machine, launchers):
        monkeypatch.setattr(module, "gpu_count", lambda: 4)
    on_gpus = replace(config, device="cuda")
    (run,) = planned(on_gpus, RunStore(tmp_path), Room(jobs=2))
    assert (run.plan.config.processes, run.plan.config.threads) == (2, None)
    assert seats([run], 2) == [
        {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4"},
        {"CUDA_VISIBLE_DEVICES": "2,3", "OMP_NUM_THREADS": "4"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,GPU-a,GPU-b")
    assert [seat["CUDA_VISIBLE_DEVICES"] for seat in seats([run], 6)] == ["5", "7", "GPU-a", "GPU-b", "5", "7"]
    with pytest.raises(FcEvalError, match=r"processes=3 needs as many GPUs, but a run has 2 \(jobs=2\)"):
        settled(replace(on_gpus, processes=3), Room(jobs=2))
    with pytest.raises(FcEvalError, match="launcher=joblib does not deal out the GPUs"):
        check_room(run, Job.from_mapping({"launcher": {"name": "joblib"}, "jobs": 2}))


def test_a_cluster_is_asked_for_what_its_jobs_need(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    slurm = {"name": "submitit", "executor": "slurm", "gpus": 2, "cpus": 8, "timeout_min": 60, "partition": "big"}
    job = Job.from_mapping({"launcher": slurm | {"options": {"slurm_exclude": "node7"}}, "out": str(tmp_path)})
    assert (room_of(job), job.at_a_time) == (Room(cpus=8, gpus=2), None)
    config = compose_one([*TINY, "threads=null", "device=auto", "comm=int4"])
    assert (settled(config, room_of(job)).device, settled(config, room_of(job)).processes) == ("cuda", 2)
    on_cpus = room_of(Job.from_mapping({"launcher": slurm | {"gpus": 0}}))
    assert (settled(config, on_cpus).device, settled(config, on_cpus).threads) == ("cpu", 8)
    local = {"name": "submitit", "executor": "local", "gpus": 1, "cpus": 3}
    assert room_of(Job.from_mapping({"launcher": local, "jobs": 2})) == Room(jobs=2, cpus=6, gpus=2)
    assert room_of(Job.from_mapping({"launcher": local, "jobs": 2})).gpu_share() == 1
    with pytest.raises(FcEvalError, match="device=cuda but no job asks for a GPU"):
        settled(replace(config, device="cuda"), on_cpus)

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FcEvalError, match=r"submitit refuses launcher.executor=slurm: .*srun"):
        launcher_of(job)
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    asked = launcher_of(job).keywords["executor"].parameters
    assert (asked["gpus_per_node"], asked["cpus_per_task"], asked["partition"]) == (2, 8, "big")
    assert (asked["time"], asked["exclude"]) == (60, "node7")
    with pytest.raises(FcEvalError, match="Unknown argument 'colour'"):
        launcher_of(Job.from_mapping({"launcher": slurm | {"options": {"slurm_colour": 1}}, "out": str(tmp_path)}))


def test_a_job_that_is_taken_away_is_queued_again(tmp_path):
    submitit = pytest.importorskip("submitit")
    (run,) = planned(compose_one([*TINY, "comm=fp32_ordered"]), RunStore(tmp_path))
    again = launchers._Resumable(run).checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.function.run == run


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["jobs=0"], "jobs=0 is not possible: expected a whole number of runs at a time, at least 1"),
        (["launcher=submitit"], "launcher.gpus is missing"),
        (["launcher=submitit", "launcher.gpus=1"], "launcher.cpus is missing"),
        (["launcher=submitit", "launcher.executor=pbs"], "launcher.executor=pbs is not possible"),
        (["launcher=ray"], "unknown launcher 'ray'"),
        (["launcher.gpus=1"], "unknown key 'launcher.gpus'"),
        (["-m", "jobs=1,2"], "jobs holds for a whole sweep"),
    ],
)
def test_mistakes_of_launchers_are_one_sentence(tmp_path, capsys, overrides, words):
    assert main(["run", *TINY, *overrides, f"out={tmp_path / 'runs'}", "dry_run=true"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    command = ["run", *TINY, "launcher=submitit", "launcher.executor=local", f"out={tmp_path / 'runs'}"]
    assert main(command) == 2
    words = "launcher=submitit needs the package submitit, which is not installed: pip install 'fc-eval[submitit]'"
    assert words in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "runs")
    (tmp_path / "half_there.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FcEvalError, match="needs half_there, which does not import here: No module named 'nothing_"):
        optional("half_there", "x=y")
