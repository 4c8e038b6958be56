"""Rows of questions as a run keeps them: ordered by document, each document once under each filter."""

import json

import pytest
from run_fixtures import Run, Task, write_run

from fc_eval.errors import FcEvalError
from fc_eval.results.record import load_run, load_runs
from fc_eval.results.samples import read_samples


@pytest.fixture
def run_path(tmp_path):
    return write_run(tmp_path, Run(tasks={"arc_easy": Task()}))


def test_samples_are_ordered_by_document(tmp_path, run_path):
    file = run_path / "samples_arc_easy.jsonl"
    before = load_run(run_path).samples["arc_easy"]
    file.write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
    after = load_run(run_path).samples["arc_easy"]
    assert before.doc_hash == after.doc_hash == tuple(sorted(before.doc_hash))
    assert before.metrics["acc"].tolist() == after.metrics["acc"].tolist()


def test_rows_of_filters_and_of_several_tasks_are_kept_apart(tmp_path):
    rows = [
        {
            "task": task,
            "doc_id": i,
            "doc_hash": f"{task}{i}",
            "filter": name,
            "target": i,
            "exact_match": float(i < limit),
        }
        for task, count in (("b", 2), ("a", 3))
        for i in range(count)
        for name, limit in (("strict", 1), ("none", 2))
    ]
    (tmp_path / "samples_x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = read_samples(tmp_path, "x")
    assert samples.doc_hash == ("a0", "a1", "a2", "b0", "b1")
    assert {key: values.tolist() for key, values in samples.metrics.items()} == {
        "exact_match": [1, 1, 0, 1, 1],
        "exact_match,strict": [1, 0, 0, 1, 0],
        "a/exact_match": [1, 1, 0],
        "a/exact_match,strict": [1, 0, 0],
        "b/exact_match": [1, 1],
        "b/exact_match,strict": [1, 0],
    }


def test_samples_cut_off_between_two_lines_are_found(run_path):
    file = run_path / "samples_arc_easy.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:-1]))
    with pytest.raises(FcEvalError, match="200 samples of arc_easy, but 199 are kept"):
        load_run(run_path)


@pytest.mark.parametrize("copies", [slice(None), slice(3, 4)], ids=["all rows", "one row"])
def test_a_row_that_is_there_twice_makes_the_record_broken(tmp_path, run_path, copies):
    file = run_path / "samples_arc_easy.jsonl"
    lines = file.read_text().splitlines()
    repeated = int(json.loads(lines[copies][0])["doc_id"])
    file.write_text("\n".join([*lines, *lines[copies]]) + "\n")
    records, (problem,) = load_runs(tmp_path)
    assert (records, problem.state) == ([], "broken")
    assert f"line 201 of samples_arc_easy.jsonl repeats the row of document {repeated}" in problem.reason


def test_a_filter_that_lacks_a_document_makes_the_record_broken(tmp_path):
    rows = [
        {"doc_id": i, "doc_hash": str(i), "filter": name, "acc": 1} for i in range(2) for name in ("none", "strict")
    ]
    (tmp_path / "samples_x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    with pytest.raises(FcEvalError, match=r"samples_x\.jsonl lacks rows of a filter for some documents"):
        read_samples(tmp_path, "x")
