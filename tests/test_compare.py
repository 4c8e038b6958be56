"""Deltas with known answers, refusals that name their reason, the table of all numbers, and how numbers are written."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from run_fixtures import Run, Task, quantized, write_run

from fc_eval.errors import FcEvalError
from fc_eval.results.compare import compare_runs, pair_runs, published_flags, render_comparison
from fc_eval.results.record import load_run
from fc_eval.results.text import delta_text, interval_text, value_text


def written(tmp_path, *runs):
    return [load_run(write_run(tmp_path, run)) for run in runs]


def one(deltas, eval_name, metric):
    return next(d for d in deltas if (d.eval, d.metric) == (eval_name, metric))


def test_perplexity_delta_is_what_was_put_in(tmp_path):
    base = Run(windows=16)
    arm = replace(quantized(base, "int4", 4.25, 0.02), spread=0.004)
    b, a = written(tmp_path, base, arm)
    d = one(compare_runs(a, b), "wikitext2", "perplexity")
    assert d.ln_ratio == pytest.approx(0.02, rel=1e-9)  # rel: a difference of sums about 150 times larger
    expected = 0.004 / math.sqrt(15)
    assert d.ln_ratio_stderr == pytest.approx(expected, rel=1e-9)  # rel: a difference of sums that are far larger
    assert d.delta == d.value - d.baseline
    expected = math.exp(0.02)
    assert d.value / d.baseline == pytest.approx(expected, rel=1e-9)  # rel: a difference of sums that are far larger
    assert d.delta_stderr == d.value * d.ln_ratio_stderr
    reach = scipy.stats.t.ppf(0.975, 15) * d.ln_ratio_stderr
    expected = d.baseline * math.expm1(d.ln_ratio - reach)
    assert d.low == pytest.approx(expected, rel=1e-6)  # rel: bisection of the quantile
    expected = d.baseline * math.expm1(d.ln_ratio + reach)
    assert d.high == pytest.approx(expected, rel=1e-6)  # rel: a difference of sums that are far larger
    expected = 2 * scipy.stats.t.sf(d.ln_ratio / d.ln_ratio_stderr, 15)
    assert d.p_value == pytest.approx(expected, abs=1e-12)  # abs: 1 - sum
    assert (d.test, d.samples, d.partial) == ("t", 16, True)
    # The paired error is far below the text's own, which both runs share.
    assert d.delta_stderr < 0.05 * d.value_stderr


def test_documents_are_units(tmp_path):
    base = Run(windows=16, clusters=4)
    arm = replace(quantized(base, "int4", 4.25, 0.02), spread=0.004)
    b, a = written(tmp_path, base, arm)
    d = one(compare_runs(a, b), "wikitext2", "perplexity")
    # Clusters 0..3 take windows of one sign each, so each document is off by 0.004, and there are four of them.
    assert d.ln_ratio_stderr == pytest.approx(0.004 / math.sqrt(3), rel=1e-9)  # rel: a difference of large sums


def test_task_delta_is_what_was_put_in(tmp_path):
    base = Run(tasks={"piqa": Task(400, 250)})
    b, a = written(tmp_path, base, quantized(base, "int4", 4.25, 0.02, tasks={"piqa": Task(400, 250, 13, 3)}))
    d = one(compare_runs(a, b), "piqa", "acc_norm")
    difference_n = np.array([-1.0] * 13 + [1.0] * 3 + [0.0] * 384)
    assert (d.value, d.baseline, d.lost, d.gained) == (0.6, 0.625, 13, 3)
    assert d.delta == pytest.approx(-0.025, rel=1e-12)  # rel: one subtraction of rounded shares
    assert d.delta_stderr == pytest.approx(scipy.stats.sem(difference_n), rel=1e-12)  # rel: order of summation
    assert d.p_value == pytest.approx(scipy.stats.binomtest(3, 16).pvalue, rel=1e-12)  # rel: scipy's is rounded
    assert d.test == "exact"
    assert d.low < d.delta < d.high
    assert d.recovery == 0.6 / 0.625
    assert d.value_stderr == a.results["piqa"]["acc_norm_stderr"]


def test_no_difference_is_no_difference(tmp_path):
    base = Run(tasks={"piqa": Task()})
    same = replace(quantized(base, "int8", 8.25, 0.0), spread=0.0)
    b, a = written(tmp_path, base, same)
    for d in compare_runs(a, b):
        assert (d.delta, d.delta_stderr, d.low, d.high, d.p_value) == (0.0, 0.0, 0.0, 0.0, 1.0)
        assert delta_text(d) in ("0 ± 0", "0.00 ± 0.00")


def test_divergence_is_against_the_baseline_itself(tmp_path):
    base = Run()
    b, a = written(tmp_path, base, quantized(base, "int4", 4.25, 0.02, divergence=True))
    deltas = compare_runs(a, b)
    kl, top1 = one(deltas, "wikitext2", "kl_mean"), one(deltas, "wikitext2", "same_top1")
    assert (kl.baseline, kl.delta) == (0.0, kl.value)
    assert kl.delta_stderr == pytest.approx(0.001 / math.sqrt(15), rel=1e-9)  # rel: a difference of large sums
    assert (top1.baseline, top1.delta) == (1.0, top1.value - 1.0)
    assert top1.delta_stderr > 0
    worst = one(deltas, "wikitext2", "kl_max")
    assert math.isnan(worst.delta_stderr)
    assert math.isnan(worst.baseline)


def test_a_metric_that_is_no_mean_has_no_paired_error(tmp_path):
    base = Run(tasks={"odd": Task()})
    paths = [write_run(tmp_path, run) for run in (base, quantized(base, "int4", 4.25, 0.02))]
    for path, value in zip(paths, (8.0, 8.5), strict=True):
        result = json.loads((path / "result.json").read_text())
        result["results"]["odd"]["word_perplexity"] = value
        (path / "result.json").write_text(json.dumps(result))
    d = one(compare_runs(load_run(paths[1]), load_run(paths[0])), "odd", "word_perplexity")
    assert (d.value, d.baseline, d.delta) == (8.5, 8.0, 0.5)
    assert math.isnan(d.delta_stderr)
    assert delta_text(d) == "+0.500 ± n/a"


def test_one_window_has_no_error_and_says_so(tmp_path):
    base = Run(windows=1)
    b, a = written(tmp_path, base, quantized(base, "int4", 4.25, 0.02))
    d = one(compare_runs(a, b), "wikitext2", "perplexity")
    assert (d.samples, math.isnan(d.delta_stderr)) == (1, True)
    assert re.fullmatch(r"\+\d+\.\d+ \(one sample has no error\)", delta_text(d))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, r"differ in model \(other and smollm2\)"),
        ({"dtype": "fp16"}, r"dtype \(fp16 and bf16\)"),
        ({"tp": 2}, r"tp \(2 and 4\)"),
        ({"device": "cuda:1"}, r"device type \(cuda and cpu\)"),
        ({"batch_size": 4}, r"batch size .*\(4, 1\) and \(8, 1\)"),
        ({"protocol": {"bos": True}}, r"protocol of wikitext2: bos \(True and False\)"),
        ({"protocol": {"token_ids_sha256": "f" * 64}}, "they differ in the tokens of wikitext2: compare"),
        ({"windows": 12}, r"window count \(12 and 16\)"),
        ({"clusters": 2}, "documents of the windows"),
        ({"texts": ("text",)}, "at least one evaluation in common"),
    ],
)
def test_pairs_that_differ_are_refused_with_the_reason(tmp_path, change, words):
    base = Run()
    arm = replace(quantized(base, "int4", 4.25, 0.02), **change)
    b, a = written(tmp_path, base, arm)
    with pytest.raises(FcEvalError, match=words):
        compare_runs(a, b)
    pair = next(p for p in pair_runs([a, b]) if p.record is a)
    assert pair.problem
    assert all(math.isnan(d.delta) for d in pair.deltas)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_files": ["a" * 64]}, "they differ in the contents of the model's files: compare"),
        ({"config": {"model": {"tiny": {"family": "llama", "seed": 1}}}}, "model.tiny"),
        ({"config": {"model": {"attn_implementation": "eager"}}}, r"model.attn_implementation \(eager and sdpa\)"),
    ],
)
def test_two_models_of_one_name_are_refused(tmp_path, settings, words):
    b, a = written(tmp_path, Run(), quantized(Run(), "int4", 4.25, 0.02))
    theirs = {"tiny": {"family": "llama", "seed": 0}, "attn_implementation": "sdpa"}
    b = replace(b, config={"config": {"model": theirs}, "model_files": ["b" * 64]})
    ours = settings.get("config", {"model": theirs})
    a = replace(a, config={"config": ours, "model_files": settings.get("model_files", ["b" * 64])})
    with pytest.raises(FcEvalError, match=words):
        compare_runs(a, b)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda rows: rows[:-1], r"same questions of piqa \(199 and 200; 1 are in one run only"),
        (lambda rows: [*rows[:-1], rows[-1] | {"doc_hash": "other"}], "2 are in one run only"),
        (lambda rows: [*rows[:-1], rows[-1] | {"doc_hash": rows[0]["doc_hash"]}], "1 are in one run only"),
    ],
)
def test_other_questions_are_refused(tmp_path, edit, words):
    base = Run(tasks={"piqa": Task()})
    paths = [write_run(tmp_path, run) for run in (base, quantized(base, "int4", 4.25, 0.02))]
    file = paths[1] / "samples_piqa.jsonl"
    rows = edit([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = json.loads((paths[1] / "result.json").read_text())
    result["evals"]["piqa"]["samples"] = len(rows)
    result["results"]["piqa"] = {key: float(np.mean([row[key] for row in rows])) for key in ("acc", "acc_norm")}
    (paths[1] / "result.json").write_text(json.dumps(result))
    with pytest.raises(FcEvalError, match=words):
        compare_runs(load_run(paths[1]), load_run(paths[0]))


def test_repeated_questions_are_paired_in_their_order(tmp_path):
    # Some tasks hold the same question twice: equal hashes are no mistake, and pair by document id.
    base = Run(tasks={"piqa": Task(10, 6)})
    paths = [
        write_run(tmp_path, run) for run in (base, quantized(base, "int4", 4.25, 0.02, tasks={"piqa": Task(10, 6, 1)}))
    ]
    for path in paths:
        rows = [json.loads(line) for line in (path / "samples_piqa.jsonl").read_text().splitlines()]
        rows = [row | {"doc_hash": "same"} if row["doc_id"] < 4 else row for row in rows]
        (path / "samples_piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    d = one(compare_runs(load_run(paths[1]), load_run(paths[0])), "piqa", "acc")
    assert (d.lost, d.gained) == (1, 0)


def test_an_evaluation_that_the_baseline_lacks_stands_alone(tmp_path):
    base = Run()
    arm = replace(quantized(base, "int4", 4.25, 0.02), texts=("wikitext2", "text"))
    b, a = written(tmp_path, base, arm)
    deltas = compare_runs(a, b)
    assert one(deltas, "wikitext2", "perplexity").baseline > 0
    lone = one(deltas, "text", "perplexity")
    assert lone.value > 0
    assert math.isnan(lone.baseline)


def test_baselines_far_from_published_numbers_are_flagged(tmp_path):
    exact = math.exp(3.0)
    run = Run(partial=False, published={"wikitext2": exact}, texts=("wikitext2", "c4"))
    (record,) = written(tmp_path, run)
    value = record.results["wikitext2"]["perplexity"]

    def flags(change, **fields):
        return published_flags(replace(record, published={"wikitext2": value + change}, **fields))

    assert flags(0.02) == flags(-0.02) == []
    assert len(flags(0.021)) == len(flags(-0.021)) == 1
    assert "within 0.02 of the published" in flags(0.5)[0]
    partial = {name: replace(info, partial=True) for name, info in record.evals.items()}
    assert flags(0.5, evals=partial) == []
    assert flags(0.5, baseline_fingerprint="x") == []
    assert published_flags(replace(record, published={"c4": 1.0})) == []  # a subset has no published number


def test_render_comparison(tmp_path):
    base = Run(tasks={"arc_easy": Task()})
    b, a = written(tmp_path, base, quantized(base, "int4", 4.25, 0.02, tasks={"arc_easy": Task(lost=9, gained=2)}))
    text = render_comparison(b, a)
    lines = text.splitlines()
    assert lines[0].startswith("base  ")
    assert "INT4 g128, 4.25 bits" in lines[1]
    assert "run − base" in text
    assert "+0.397 ± 0.022" in text
    accuracy = next(line for line in lines if line.startswith("arc_easy") and "acc_norm" in line)
    for part in ("200 (partial)", "56.50", "60.00", "−3.50 ± 1.64", "0.065 exact", "9/2"):
        assert part in accuracy
    # A baseline is the base in either order.
    swapped = render_comparison(a, b).splitlines()
    assert swapped[:2] == lines[:2]
    assert "the second one given is the baseline" in swapped[2]
    assert swapped[3:] == lines[2:]


def test_two_arms_are_compared_in_the_order_given(tmp_path):
    base = Run()
    int8, int4 = written(tmp_path, quantized(base, "int8", 8.25, 0.001), quantized(base, "int4", 4.25, 0.02))
    assert "+0.377" in render_comparison(int8, int4)
    assert "−0.377" in render_comparison(int4, int8)


def test_a_pair_shows_on_the_screen_what_it_shows_in_a_report(tmp_path):
    base = Run(tasks={"arc_easy": Task()}, texts=("wikitext2", "text"))
    arm = quantized(base, "int4", 4.25, 0.3, tasks={"arc_easy": Task(lost=9, gained=2)}, divergence=True)
    b, a = written(tmp_path, base, arm)
    (pair,) = (pair for pair in pair_runs([b, a]) if pair.record is a)
    assert repr(pair.deltas) == repr(tuple(compare_runs(a, b)))  # as text, because NaN is not equal to itself
    screen = render_comparison(b, a)
    for d in pair.deltas:
        row = next(line for line in screen.splitlines() if line.startswith(d.label) and f"  {d.metric} " in line)
        for text in (delta_text(d), interval_text(d), value_text(d.value, d.metric)):
            assert text in row


def test_runs_may_differ_in_their_weights_alone(tmp_path):
    base = Run()
    b, same, other = written(
        tmp_path,
        base,
        replace(base, weights="W8A8 (alpha 0.85)", shift=0.01),
        replace(quantized(base, "int4", 4.25, 0.02), weights="W8A8 (alpha 0.85)"),
    )
    d = one(compare_runs(same, b), "wikitext2", "perplexity")
    assert d.ln_ratio == pytest.approx(0.01, rel=1e-9)  # rel: a difference of sums about 300 times larger
    assert "bf16 W8A8 (alpha 0.85) tp=4" in render_comparison(b, same)
    with pytest.raises(FcEvalError, match=r"differ in weights \(W8A8 \(alpha 0\.85\) and native\): compare runs that"):
        compare_runs(other, b)
