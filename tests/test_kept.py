"""What an earlier attempt at a run left: an evaluation is kept if all its files read and fit together."""

import json
import math

import numpy as np
import pytest

from fc_eval.errors import FcEvalError
from fc_eval.results.kept import kept_eval
from fc_eval.results.store import RunFolder


@pytest.fixture
def half_run(tmp_path):
    """A folder with one finished perplexity and one finished task, and no result."""
    folder = RunFolder(tmp_path / "half", "f" * 64)
    n = 8
    arrays = {"nll_sum": np.full(n, 300.0), "tokens": np.full(n, 100), "cluster": np.arange(n)}
    shared = {"schema": 1, "partial": True, "protocol": {}, "comm": {}, "seconds": 1.5}
    text = shared | {"kind": "perplexity", "label": "text", "samples": n, "metrics": {"perplexity": math.exp(3)}}
    folder.save_eval("text", text, arrays, None)
    rows = [{"doc_id": i, "doc_hash": f"{i:064x}", "acc": float(i < 3)} for i in range(4)]
    task = shared | {"kind": "task", "label": "piqa", "samples": 4, "metrics": {"acc": 0.75, "odd": None}}
    folder.save_eval("piqa", task, None, rows)
    return folder.path


def test_a_finished_evaluation_is_kept(half_run):
    assert kept_eval(half_run, "text")["metrics"] == {"perplexity": math.exp(3)}
    assert kept_eval(half_run, "piqa")["samples"] == 4
    assert kept_eval(half_run, "other") is None


@pytest.mark.parametrize(
    ("name", "file"),
    [("text", "evals/text.json"), ("text", "windows_text.npz"), ("piqa", "samples_piqa.jsonl")],
)
def test_an_evaluation_of_which_a_file_is_cut_or_gone_is_not_kept(half_run, name, file):
    whole = (half_run / file).read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 3):
        (half_run / file).write_bytes(whole[:size])
        with pytest.raises(FcEvalError, match=f"{file}|2 are kept"):
            kept_eval(half_run, name)
    if "evals" not in file:
        (half_run / file).unlink()
        with pytest.raises(FcEvalError, match=f"there is no .*{file}"):
            kept_eval(half_run, name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 7}, "7 samples of text, but 8 are kept"),
        ({"metrics": {"perplexity": 21.0}}, "perplexity 21, but its samples give 20.08"),
        ({"metrics": [1]}, "malformed"),
        ({"samples": None}, "malformed"),
        ({"schema": 2}, "newer than the 1 known here"),
    ],
)
def test_an_evaluation_that_contradicts_itself_is_not_kept(half_run, change, words):
    file = half_run / "evals" / "text.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(FcEvalError, match=words):
        kept_eval(half_run, "text")


def test_an_evaluation_without_its_time_is_not_kept(half_run):
    file = half_run / "evals" / "text.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "seconds"}))
    with pytest.raises(FcEvalError, match="has no 'seconds'"):
        kept_eval(half_run, "text")
