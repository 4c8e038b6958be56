"""Several processes end together: signals, deaths and mistakes, each told in one line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launching import ROOT, launched, start

from fc_eval import launch
from fc_eval.compose import compose_one
from fc_eval.results.store import RunStore
from fc_eval.sweep import child, planned_run
from fc_eval.sweep.execute import execute, summarize
from fc_eval.sweep.plan import plan


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # ended, and waits for whoever adopted it


def until(what, seconds=60.0):
    """Waits for `what()`; a test that would wait for ever fails instead."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_the_one_that_started_it(tmp_path, tmp_path_factory, monkeypatch, name):
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("launch")))  # one that is killed leaves its folder there
    process = start(2, "launching", str(tmp_path))
    until(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    process.send_signal(signal.Signals[name])
    said, _ = process.communicate(timeout=60)
    number = signal.Signals[name].value
    assert process.returncode == (-number if name == "SIGKILL" else 128 + number), said
    assert "Traceback" not in said
    until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_launcher_that_is_stopped_before_its_processes_run_leaves_nothing(tmp_path, name):
    code = (
        "import sys, time, torch.distributed.launcher.api as api\n"
        "from fc_eval.launch import launch\n"
        "def wait(config, entrypoint): print('here', flush=True); time.sleep(600)\n"
        "api.elastic_launch = wait\n"
        "sys.exit(launch(2, 'launching'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "here\n"
        assert [path.name.startswith("fc_eval_launch_") for path in tmp_path.iterdir()] == [True]
        process.send_signal(signal.Signals[name])
        assert process.wait(60) == 128 + signal.Signals[name].value
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_the_user_is_said_once():
    said = launched(2, "launching", "mistake")
    assert (said.returncode, said.stdout) == (2, "error: the text is too short: give more\n")


@pytest.mark.parametrize(
    ("exits", "status", "words"),
    [
        ({0: launch.LOST_EXIT, 1: -9}, launch.KILLED_EXIT, "process 1 of 3 .* was killed by SIGKILL .*memory"),
        ({0: -15, 1: launch.LOST_EXIT, 2: 1}, 1, "process 2 of 3 .* ended with exit status 1"),
        ({0: launch.LOST_EXIT, 1: -15}, 1, "process 0 of 3 .* lost the others, which did not end"),
    ],
)
def test_the_cause_is_told_from_its_consequences(capsys, exits, status, words):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {index: ProcessFailure(index, 1000 + index, code, "nowhere") for index, code in exits.items()}
    assert launch._explain(ChildFailedError("run", failures), 3) == status
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(words, line), line


def test_a_process_that_dies_is_named_and_the_run_goes_on_where_it_was(tmp_path, monkeypatch, in_this_process):
    """One evaluation is kept from before, two processes finish the next, one dies in the last; one process goes on."""
    text = tmp_path / "own.txt"
    text.write_text("".join(f"Line {i} of a text that is soon tokenized.\n" for i in range(20)))
    names = ("early", "text", "more")
    evals = [
        f"+eval.runs.{name}={{kind:perplexity,protocol:text,window_tokens:{tokens},path:{text}}}"
        for name, tokens in zip(names, (32, 64, 48), strict=True)
    ]
    settings = ["model=tiny", "comm=fp32_ordered", "tp=2", "device=cpu", "threads=1", "eval.limit=3", "eval=[]"]
    config = compose_one([*settings, *evals, "processes=2"])
    alone, store = RunStore(tmp_path / "alone"), RunStore(tmp_path / "runs")
    alone.prepare()
    store.prepare()
    (one,) = execute(replace(config, processes=1), alone, say=lambda text: None)
    assert one.state == "done"

    started = plan(config)
    assert started.fingerprint == one.folder.fingerprint
    folder = store.folder(started.name, started.fingerprint).path
    (folder / "evals").mkdir(parents=True)
    for name in ("windows_early.npz", "evals/early.json"):
        shutil.copy(one.folder.path / name, folder / name)
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import os, signal
            if os.environ.get("RANK") == "1":
                import fc_eval.evaluate.run as evaluation
                losses, calls = evaluation.window_losses, []
                def die_in_the_second(*args, **kwargs):
                    calls.append(1)
                    if len(calls) == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return losses(*args, **kwargs)
                evaluation.window_losses = die_in_the_second
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with monkeypatch.context() as patch:
        patch.setattr(planned_run, "run_child", child.run_child)
        (broken,) = execute(config, store, say=lambda text: None)
    assert broken.state == "failed"
    assert str(broken.error).startswith("process 1 of 2 (counted from 0) was killed by SIGKILL")
    assert summarize([broken], say=lambda text: None) == 1  # as with one process: no mistake of the user's
    assert {path.stem for path in folder.glob("evals/*")} == {"early", "text"}
    said = broken.folder.log_path.read_text()
    assert said.count("early: kept from before") == 1  # one process speaks, and the other has gone on with it
    assert said.count("text: 3/3") == 1

    (whole,) = execute(replace(config, processes=1), store, say=lambda text: None)
    assert whole.state == "done"
    said = whole.folder.log_path.read_text()
    assert said.count("text: kept from before") == 1
    assert said.count("more: 3/3") == 1
    for name in names:
        windows = f"windows_{name}.npz"
        assert (one.folder.path / windows).read_bytes() == (whole.folder.path / windows).read_bytes()
    for name, carried_out in (*((f"evals/{name}", "seconds") for name in names), ("result", "time")):
        first, second = (json.loads((run.folder.path / f"{name}.json").read_text()) for run in (one, whole))
        assert first.pop(carried_out)
        assert second.pop(carried_out)
        assert first == second
