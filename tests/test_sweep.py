"""Sweeps: children that raise, exit or are killed leave the others alone, and only what is missing runs again."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from fc_eval.cli import main
from fc_eval.commands.run import compose_one
from fc_eval.results.store import RunStore
from fc_eval.sweep import planned_run
from fc_eval.sweep.execute import execute, foretell, planned
from fc_eval.sweep.plan import plan
from fc_eval.sweep.planned_run import Outcome

ROOT = Path(__file__).parents[1]
TINY = ["model=tiny", "tp=2", "eval=text", "eval.limit=2", "eval.runs.text.window_tokens=64", "threads=1", "device=cpu"]


def fc_eval(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fc_eval.cli", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}),
        cwd=ROOT,
        check=False,
    )


def states(runs: Path) -> dict[str, str]:
    return {p.parent.name[:-11]: json.loads(p.read_text())["state"] for p in sorted(runs.glob("*/status.json"))}


@pytest.fixture
def sabotage(tmp_path) -> dict[str, str]:
    """An environment in which three arms meet their ends: INT7 raises, INT6 exits, INT5 is killed."""
    folder = tmp_path / "sabotage"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            if "fc_eval.run" in " ".join(sys.orig_argv):
                text = open(os.path.join(sys.orig_argv[-1], "config.yaml")).read()
                if "reduce: int7" in text:
                    raise_it = lambda *a: (_ for _ in ()).throw(RuntimeError("the arm raised"))
                    import builtins
                    import fc_eval.parallel.emulate as emulate
                    emulate.communicate = raise_it
                if "reduce: int6" in text:
                    print("leaving early"); sys.stdout.flush(); os._exit(7)
                if "reduce: int5" in text:
                    os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def with_a_baseline(runs: Path) -> Path:
    """The folder with a finished baseline, so that a sweep has its arms alone to compute."""
    store = RunStore(runs)
    store.prepare()
    (outcome,) = execute(compose_one([*TINY, "comm=fp32_ordered", f"out={runs}"]), store, say=lambda text: None)
    assert outcome.state == "done"
    return runs


def test_failed_arms_leave_the_others_alone_and_only_they_run_again(tmp_path, capsys, sabotage, in_this_process):
    runs = with_a_baseline(tmp_path / "runs")
    command = ["run", "-m", "comm=int7,int6,int5,int4", *TINY, f"out={runs}"]
    first = fc_eval(*command, env=sabotage)
    assert first.returncode == 1, first.stderr
    ends = {name.split("-")[1]: state for name, state in states(runs).items()}
    assert ends == {"fp32_ordered": "done", "int7": "failed", "int6": "failed", "int5": "failed", "int4": "done"}
    assert "= tiny-fp32_ordered" in first.stdout
    assert "the arm raised" in first.stdout
    assert "exit status 7: leaving early" in first.stdout
    assert "killed by SIGKILL" in first.stdout
    assert "text: 2/2 windows" in first.stderr  # a child's words are heard

    assert main(["report", str(runs), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "the arm raised" in page
    assert "killed by SIGKILL" in page

    capsys.readouterr()
    assert main([*command, "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert said.count("would run") == 3
    assert said.count("done before") == 2
    assert main(command) == 0
    assert "3 done" in capsys.readouterr().out
    assert set(states(runs).values()) == {"done"}


def test_fail_fast_stops_after_the_first_failure(tmp_path, sabotage, in_this_process):
    runs = with_a_baseline(tmp_path / "runs")
    result = fc_eval("run", "-m", "comm=int6,int4", "fail_fast=true", *TINY, f"out={runs}", env=sabotage)
    assert result.returncode == 1
    assert sorted(name.split("-")[1] for name in states(runs)) == ["fp32_ordered", "int6"]


def test_two_processes_compute_their_common_baseline_once(tmp_path, in_this_process):
    store = RunStore(tmp_path / "runs")
    store.prepare()
    configs = [compose_one([*TINY, f"comm={comm}", f"out={store.root}"]) for comm in ("int8", "fp32_ordered")]
    outcomes: dict[int, list[Outcome]] = {}
    threads = [
        threading.Thread(target=lambda i=i, c=c: outcomes.update({i: execute(c, store, say=lambda text: None)}))
        for i, c in enumerate(configs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes[i][0].state for i in outcomes) == ["done", "skipped"]
    assert [outcome.state for outcome in outcomes[0][1:]] == ["done"]
    read = [json.loads(path.read_text()) for path in store.root.glob("*/result.json")]
    results = {result["fingerprint"]: result for result in read}
    assert len(results) == 2
    baseline = plan(configs[1]).fingerprint
    assert {r["baseline_fingerprint"] for f, r in results.items() if f != baseline} == {baseline}
    for fingerprint, result in results.items():
        assert result["calls"]["total"] == result["calls"]["sites"] * result["calls"]["forwards"]
        assert (result["wire"]["effective_bits"] == 16.0) == (fingerprint == baseline)


def test_a_killed_parent_leaves_a_run_that_is_taken_up_again(tmp_path, in_this_process):
    runs = with_a_baseline(tmp_path / "runs")
    target = compose_one([*TINY, "comm=fp32_ordered", f"out={runs}"])
    (run,) = planned(target, RunStore(runs))
    before, status = run.folder.read_result(), run.folder.status()
    (run.folder.path / "result.json").unlink()
    assert [outcome.state for outcome in foretell([run], say=lambda text: None)] == ["planned"]

    (run.folder.path / "status.json").write_text(
        json.dumps(status | {"state": "running", "ended": None, "pid": 2**22 + 1, "heartbeat": 0})
    )
    (outcome,) = execute(target, RunStore(runs), say=lambda text: None)
    assert outcome.state == "done"
    assert run.folder.status()["state"] == "done"
    assert "text: kept from before" in run.folder.log_path.read_text()
    (digest,) = before["contents"]["data"]["text"]
    assert len(digest) == 64
    assert run.folder.read_result()["results"] == before["results"]


@pytest.mark.parametrize("damage", ["empty", "cut", "gone"])
def test_what_a_finished_run_lost_is_computed_again(tmp_path, damage, in_this_process):
    store, said = RunStore(tmp_path / "runs"), []
    store.prepare()
    config = compose_one([*TINY, "comm=fp32_ordered", "eval=[text,everyday]"])
    (outcome,) = execute(config, store, say=said.append)
    folder = outcome.folder
    before, windows = folder.read_result(), folder.path / "windows_text.npz"
    whole = windows.read_bytes()
    windows.unlink()
    if damage != "gone":
        windows.write_bytes(b"" if damage == "empty" else whole[: len(whole) // 2])
    said.clear()
    (again,) = execute(config, store, say=said.append)
    assert again.state == "done"
    assert said[0].startswith("! tiny-fp32_ordered")
    assert "windows_text.npz" in said[0]
    log = folder.log_path.read_text()
    assert "text: not kept from before" in log
    assert "everyday: kept from before" in log
    after = folder.read_result()
    assert after["results"] == before["results"]
    assert after["time"]["evals_s"]["everyday"] == before["time"]["evals_s"]["everyday"]
    spent = after["time"]
    assert spent["total_s"] == spent["setup_s"] + sum(spent["evals_s"].values())


def test_which_file_belongs_to_which_evaluation_counts(tmp_path):
    for name in ("f1", "f2"):
        (tmp_path / name).write_text(f"{name} is a text of its own " * 200)
    prints = set()
    for order in (("f1", "f1", "f2"), ("f1", "f2", "f2")):
        entries = [
            f"+eval.runs.{name}={{kind:perplexity,protocol:text,window_tokens:64,limit:2,path:{tmp_path / file}}}"
            for name, file in zip("abc", order, strict=True)
        ]
        prints.add(plan(compose_one(["model=tiny", "tp=2", "device=cpu", "eval=[]", *entries])).fingerprint)
    assert len(prints) == 2


def test_numbers_of_files_that_changed_during_the_run_are_thrown_away(tmp_path, monkeypatch, in_this_process):
    text = tmp_path / "text.txt"
    text.write_text("the first text " * 400)
    store = RunStore(tmp_path / "runs")
    store.prepare()
    target = plan(compose_one([*TINY, "comm=fp32_ordered", f"eval.runs.text.path={text}"]))

    def swap_and_run(folder, seat):
        text.write_text("quite another text " * 400)  # after the fingerprint was made, before the run reads it
        return in_this_process(folder, seat)

    monkeypatch.setattr(planned_run, "run_child", swap_and_run)
    (outcome,) = execute(target.config, store, say=lambda text: None)
    assert outcome.state == "failed"
    assert "files changed while it ran" in str(outcome.error)
    assert not list(store.root.glob("*/result.json"))
    assert not list(store.root.glob("*/evals/*"))


def test_a_baseline_is_the_same_run_however_it_was_asked_for():
    arm = compose_one([*TINY, "comm=int4", "eval.divergence=true", "codec=reference"])
    asked = compose_one([*TINY, "comm=fp32_ordered", "eval.divergence=true", "codec=reference"])
    assert plan(asked).fingerprint == plan(arm.baseline()).fingerprint


def test_the_fingerprint_follows_contents_and_not_places(tmp_path):
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("the same text " * 400)
    other.write_text("the same text " * 400)
    prints = [plan(compose_one([*TINY, f"eval.runs.text.path={path}"])).fingerprint for path in (one, other)]
    assert prints[0] == prints[1]
    other.write_text("another text " * 400)
    assert plan(compose_one([*TINY, f"eval.runs.text.path={other}"])).fingerprint != prints[0]
    changed = {"tp=4", "comm.group_size=32", "model.dtype=fp32", "eval.limit=3", "seed=1"}
    others = {plan(compose_one([*TINY, f"eval.runs.text.path={one}", change])).fingerprint for change in changed}
    assert len(others | {prints[0]}) == len(changed) + 1
