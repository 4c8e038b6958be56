"""Run folders are read with suspicion: what is cut off, foreign or contradictory is said; nothing disappears."""

import errno
import json
import math
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from run_fixtures import Run, Task, quantized, small_set, write_run, write_status

from fc_eval.errors import FcEvalError, os_error
from fc_eval.results.files import write_atomic
from fc_eval.results.record import load_run, load_runs
from fc_eval.results.store import RunFolder

NOW = 1_000_000.0


@pytest.fixture
def run_path(tmp_path):
    return write_run(tmp_path, Run(tasks={"arc_easy": Task()}))


def edit_result(path, **changes):
    file = path / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_reads_what_was_written(tmp_path):
    base, _, int4 = small_set(tmp_path)
    records, problems = load_runs(tmp_path)
    assert problems == []
    by_fingerprint = {record.fingerprint: record for record in records}
    record = by_fingerprint[int4.fingerprint]
    assert record.baseline_fingerprint == base.fingerprint
    assert not record.is_baseline
    assert by_fingerprint[base.fingerprint].is_baseline
    assert (record.arm.comm, record.arm.group_size, record.arm.tp) == ("int4", 128, 4)
    assert record.wire_number("effective_bits") == 4.25
    assert math.isnan(record.wire_number("no such number"))
    assert record.batch_size == (8, 1)
    assert record.device_type == "cpu"
    assert len(record.windows["wikitext2"].tokens) == 16
    assert len(record.samples["arc_easy"].doc_hash) == 200


def test_perplexities_come_before_tasks_whatever_the_order_in_the_file(tmp_path):
    path = write_run(tmp_path, Run(texts=("text", "c4", "wikitext2"), tasks={"a_task": Task(), "piqa": Task()}))
    assert list(load_run(path).evals) == ["wikitext2", "c4", "text", "piqa", "a_task"]


def test_a_number_that_was_not_finite_is_nan(tmp_path, run_path):
    results = json.loads((run_path / "result.json").read_text())["results"]
    results["wikitext2"]["perplexity"] = None
    edit_result(run_path, results=results)
    assert math.isnan(load_run(run_path).results["wikitext2"]["perplexity"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "newer than the 1 known here: update fc-eval"),
        ({"schema": None}, "schema None, expected 1"),
        ({"schema": "1"}, "schema '1', expected 1"),
        ({"arm": {}}, "has no 'model'"),
        ({"results": {}}, "no results of"),
        ({"wire": 3}, "malformed"),
        ({"evals": {"wikitext2": {"kind": "perplexity", "label": "w", "samples": 17, "partial": True}}}, "17 samples"),
    ],
)
def test_a_result_that_does_not_hold_is_refused(run_path, change, words):
    edit_result(run_path, **change)
    with pytest.raises(FcEvalError, match=words):
        load_run(run_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("algorithm", value) for value in (None, [], {}, 3)),
        ("comm", None),
        ("tp", "4"),
        ("tp", True),
        ("reduce_format", []),
        ("group_size", 1.5),
        ("reducer", 0),
    ],
)
def test_an_arm_of_other_types_is_refused(tmp_path, run_path, key, value):
    arm = json.loads((run_path / "result.json").read_text())["arm"]
    edit_result(run_path, arm=arm | {key: value})
    records, (problem,) = load_runs(tmp_path)
    assert (records, problem.state) == ([], "broken")
    assert f"result.json has arm.{key}={value!r}: " in problem.reason


@pytest.mark.parametrize(
    "name", ["result.json", "status.json", "windows_wikitext2.npz", "samples_arc_easy.jsonl", "config.yaml"]
)
def test_a_missing_file_is_named(tmp_path, run_path, name):
    (run_path / name).unlink()
    _, problems = load_runs(tmp_path)
    assert [problem.state for problem in problems] == ["broken"]
    assert name in problems[0].reason


FILES = ["result.json", "status.json", "windows_wikitext2.npz", "samples_arc_easy.jsonl", "config.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_anywhere_is_found(tmp_path, run_path, name):
    whole = (run_path / name).read_bytes()
    for size in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 3):
        (run_path / name).write_bytes(whole[:size])
        records, problems = load_runs(tmp_path)
        assert records == []
        assert problems[0].state == "broken"
        assert name in problems[0].reason


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ""),
        (b"null", ""),
        (b"[1, 2]", ""),
        (b"\xff\xfe\x00", "not complete"),
        (b"[" * 100_000, "not complete"),
        (None, "Is a directory (EISDIR)"),
    ],
    ids=["empty", "null", "list", "bytes", "deep", "folder"],
)
def test_whatever_lies_in_place_of_a_file_is_one_sentence_and_the_others_are_read(tmp_path, name, content, words):
    base, *_ = small_set(tmp_path)
    path = next(path for path in tmp_path.iterdir() if path.name.endswith(base.fingerprint[:8]))
    (path / name).unlink()
    if content is None:
        (path / name).mkdir()
    else:
        (path / name).write_bytes(content)
    records, problems = load_runs(tmp_path)
    assert len(records) == 2
    assert [(problem.name, problem.state) for problem in problems] == [(path.name, "broken")]
    assert name in problems[0].reason
    assert words in problems[0].reason
    assert "\n" not in problems[0].reason
    assert str(tmp_path) not in problems[0].reason


def test_a_status_that_does_not_read_is_written_anew(tmp_path):
    folder = RunFolder(tmp_path / "run", "f" * 64)
    folder.set_status("running")
    for content in ("null", "[]", "{", ""):
        (folder.path / "status.json").write_text(content)
        folder.set_status("failed", error="stopped")
        assert folder.status()["state"] == "failed"


def test_a_write_that_the_system_refuses_names_path_and_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FcEvalError, match=r"file.*: Not a directory \(ENOTDIR\): .*check the path"):
        write_atomic(tmp_path / "file" / "run" / "result.json", b"{}")
    full = OSError(errno.ENOSPC, "No space left on device", "/some/file")
    assert str(os_error(full)) == "/some/file: No space left on device (ENOSPC): free some space"


def test_no_flipped_byte_of_an_npz_ends_a_report(tmp_path, run_path):
    file = run_path / "windows_wikitext2.npz"
    with np.load(file) as data:
        np.savez_compressed(file, **dict(data))
    whole, broken = file.read_bytes(), 0
    for place in range(0, len(whole), 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        _, problems = load_runs(tmp_path)
        assert {problem.state for problem in problems} <= {"broken"}
        broken += len(problems)
    assert broken > len(whole) // 6  # the rest are time stamps and the like, which decide nothing


def test_files_of_another_run_are_found(tmp_path, run_path):
    arrays = dict(np.load(run_path / "windows_wikitext2.npz"))
    arrays["nll_sum"] = arrays["nll_sum"] * 1.01
    np.savez(run_path / "windows_wikitext2.npz", **arrays)
    with pytest.raises(FcEvalError, match=r"perplexity 19\.6.* but its samples give 20"):
        load_run(run_path)


def test_failed_running_and_dead_runs_are_problems(tmp_path):
    write_status(tmp_path, "a", state="failed", error="killed by SIGKILL")
    write_status(tmp_path, "b", state="running", heartbeat=NOW - 10)
    write_status(tmp_path, "c", state="running", heartbeat=NOW - 300)
    write_status(tmp_path, "d", state="running", heartbeat=NOW, host=socket.gethostname(), pid=2**22 + 7)
    write_status(tmp_path, "e", state="running", heartbeat=NOW, host=socket.gethostname(), pid=os.getpid())
    write_status(tmp_path, "f", state="asleep")
    write_status(tmp_path, "g", state="done")
    records, problems = load_runs(tmp_path, now=NOW)
    assert records == []
    states = {problem.name: problem.state for problem in problems}
    assert states == {
        "a": "failed",
        "b": "running",
        "c": "dead",
        "d": "dead",
        "e": "running",
        "f": "broken",
        "g": "broken",
    }
    assert problems[0].reason == "killed by SIGKILL"
    assert "no result.json" in problems[-1].reason


def test_folders_that_are_no_runs_are_left_alone(tmp_path, run_path):
    (tmp_path / ".locks").mkdir()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.md").write_text("")
    records, problems = load_runs(tmp_path)
    assert (len(records), problems) == (1, [])


def test_several_folders_and_a_run_itself(tmp_path):
    base = Run()
    first = write_run(tmp_path / "one", base)
    write_run(tmp_path / "two", quantized(base, "int4", 4.25, 0.02))
    records, problems = load_runs([tmp_path / "one", tmp_path / "two", first])
    assert (len(records), problems) == (2, [])


def test_the_same_run_twice_counts_once_and_is_said(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, Run(), name=name)
    records, problems = load_runs([tmp_path / "one", tmp_path / "two"])
    assert [record.path.name for record in records] == ["one"]
    assert [(problem.name, problem.state) for problem in problems] == [("two", "left out")]


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(FcEvalError, match=rf"{tmp_path}: Permission denied \(EACCES\): check its permissions"):
        load_runs(tmp_path)


def test_missing_folder(tmp_path):
    with pytest.raises(FcEvalError, match="is not a folder"):
        load_runs(tmp_path / "nowhere")
    with pytest.raises(FcEvalError, match="is not a folder"):
        load_run(tmp_path / "nowhere")
