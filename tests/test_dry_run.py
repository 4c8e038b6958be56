"""What a dry run says: how long a run may take, and whether its folder could be written."""

import os

import pytest

from fc_eval.cli import main
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.results.store import RunStore
from fc_eval.sweep.estimate import estimate
from fc_eval.sweep.execute import planned

TINY = ["model=tiny", "tp=2", "eval=[text,everyday]", "threads=1", "device=cpu", "comm=fp32_ordered"]


def finished(
    store: RunStore, *overrides: str, text: tuple[float, int, bool], everyday: tuple[float, int, bool]
) -> None:
    """Writes what is looked at of a finished run: seconds, samples and whether that was part of them; 4 s of setup."""
    (run,) = planned(compose_one([*TINY, *overrides]), store)
    both = {"text": text, "everyday": everyday}
    run.folder.write_config({"config": run.plan.config.as_dict()})
    run.folder.write_result(
        {
            "time": {"setup_s": 4.0, "evals_s": {name: seconds for name, (seconds, _, _) in both.items()}},
            "evals": {name: {"samples": n, "partial": partial} for name, (_, n, partial) in both.items()},
        }
    )


def seconds(store: RunStore, *overrides: str) -> float | None:
    (run,) = planned(compose_one([*TINY, *overrides]), store)
    return estimate(run)


def test_time_is_in_proportion_to_the_samples_of_finished_runs(tmp_path):
    store = RunStore(tmp_path)
    assert seconds(store) is None
    finished(store, "eval.limit=10", text=(20.0, 10, True), everyday=(5.0, 10, True))
    assert seconds(store, "eval.limit=10") == 4 + 20 + 5
    assert seconds(store, "eval.limit=20", "seed=1") == 4 + 40 + 10
    assert seconds(store) is None  # all of them, and nobody knows how many
    assert seconds(store, "eval.limit=10", "tp=4") is None
    assert seconds(store, "eval.limit=10", "eval.runs.text.window_tokens=64") is None
    finished(store, text=(300.0, 100, False), everyday=(100.0, 50, False))
    assert seconds(store, "seed=1") == 4 + 300 + 100
    # Of both runs the slower one counts, and whoever asks for more than all of the questions gets all of them.
    assert seconds(store, "eval.runs.text.limit=10", "eval.runs.everyday.limit=60") == 4 + 30 + 100
    assert seconds(store, "eval=text", "eval.limit=1") == 4 + 3


def test_a_folder_that_could_not_be_written_is_said(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    command = ["run", *TINY, "dry_run=true"]
    assert main([*command, f"out={tmp_path}/file/below/runs"]) == 2
    words = f"out={tmp_path}/file/below/runs is not writable: {tmp_path}/file: Not a directory (ENOTDIR): choose"
    assert words in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda place, mode: str(place) != str(tmp_path))
    with pytest.raises(FcEvalError, match=r"Permission denied \(EACCES\): choose another folder"):
        RunStore(tmp_path / "new" / "runs").check()
    monkeypatch.undo()
    RunStore(tmp_path / "new" / "runs").check()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
