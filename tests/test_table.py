"""The table of all numbers, the averages over tasks, and how numbers are written."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from run_fixtures import Run, Task, quantized, small_set, write_run

from fc_eval.results.record import load_run, load_runs
from fc_eval.results.table import COLUMNS, FIVE_TASKS, results_table
from fc_eval.results.text import align_points, number, value_text


def written(tmp_path, *runs):
    return [load_run(write_run(tmp_path, run)) for run in runs]


def test_results_table_columns_and_pairing(tmp_path):
    runs = small_set(tmp_path)
    table = results_table(load_runs(tmp_path)[0])
    assert list(table.columns) == list(COLUMNS)
    assert list(COLUMNS[:23]) == [
        "model",
        "weights",
        "eval",
        "metric",
        "comm",
        "algorithm",
        "reduce_format",
        "gather_format",
        "group_size",
        "tp",
        "exec",
        "codec",
        "reducer",
        "dtype",
        "effective_bits",
        "nominal_bits",
        "wire_bytes_per_rank",
        "value",
        "baseline",
        "delta",
        "delta_stderr",
        "samples",
        "partial",
    ]
    assert len(table) == 3 * 3
    row = table[(table.comm == "int4") & (table.metric == "perplexity")].iloc[0]
    assert row.baseline == table[(table.comm == "fp32_ordered") & (table.metric == "perplexity")].iloc[0].value
    assert row.delta == row.value - row.baseline
    assert (row.group_size, row.effective_bits, row.samples, row.partial) == (128, 4.25, 16, True)
    assert row.baseline_fingerprint == runs[0].fingerprint
    own = table[table.comm == "fp32_ordered"]
    assert (own.delta == 0).all()
    assert own.group_size.isna().all()


def test_a_missing_baseline_is_shown_not_guessed(tmp_path):
    # Another baseline of the same model is at hand, but it is not the one that the run names.
    other, base = Run(), Run(windows=12)
    records = written(tmp_path, other, quantized(base, "int4", 4.25, 0.02))
    row = results_table(records).query("comm == 'int4'").iloc[0]
    assert pd.isna(row.baseline)
    assert pd.isna(row.delta)
    assert base.fingerprint[:10] in row.problem


def test_five_task_average(tmp_path):
    tasks = {
        name: Task(100 * (i + 2), 60 * (i + 2), has_norm=name != "winogrande") for i, name in enumerate(FIVE_TASKS)
    }
    base = Run(tasks=tasks)
    worse = {name: replace(task, lost=10, gained=4) for name, task in tasks.items()}
    b, a = written(tmp_path, base, quantized(base, "int4", 4.25, 0.02, tasks=worse))
    table = results_table([b, a]).query("comm == 'int4'")
    average = table[(table["eval"] == "five-task average") & (table.metric == "acc_norm, acc for winogrande")].iloc[0]
    parts = [
        table[(table["eval"] == n) & (table.metric == ("acc" if n == "winogrande" else "acc_norm"))].iloc[0]
        for n in tasks
    ]
    assert average.value == pytest.approx(np.mean([p.value for p in parts]), rel=1e-12)  # rel: order of summation
    expected = -6 / 5 * sum(1 / (100 * (i + 2)) for i in range(5))
    assert average.delta == pytest.approx(expected, rel=1e-9)  # rel: order of summation
    expected = math.sqrt(sum(p.delta_stderr**2 for p in parts)) / 5
    assert average.delta_stderr == pytest.approx(expected, rel=1e-12)  # rel: order of summation
    expected = 2 * scipy.stats.norm.sf(abs(average.delta / expected))
    assert average.p_value == pytest.approx(expected, rel=1e-9)  # rel: two codes
    assert (average.lost, average.gained, average.samples) == (50, 20, 2000)
    assert len(table[table["eval"] == "five-task average"]) == 2


def test_no_average_over_fewer_tasks(tmp_path):
    (record,) = written(tmp_path, Run(tasks={name: Task() for name in FIVE_TASKS[:4]}))
    assert not (results_table([record])["eval"] == "five-task average").any()


def test_numbers_as_text():
    assert number(-0.0004, 2) == "0.00"
    assert number(-1.5, 1, sign=True) == "−1.5"
    assert number(12345.678, 1) == "12,345.7"
    assert number(math.nan, 2) == "n/a"
    assert number(math.inf, 2) == "inf"
    assert value_text(0.6512, "acc_norm") == "65.12"
    assert value_text(5.4717, "perplexity") == "5.472"
    assert value_text(0.000123, "kl_mean") == "0.000123"


def test_points_stand_under_each_other():
    cells = ["+0.0079 ± 0.0014", "+10.4 ± 0.2", "n/a", "−3 ± 12"]
    aligned = align_points(cells)
    assert aligned[2] == "n/a"
    numeric = [aligned[0], aligned[1], aligned[3]]
    assert len({len(text) for text in numeric}) == 1
    assert len({text.index("±") for text in numeric}) == 1
    assert aligned[0].index(".") == aligned[1].index(".")
    assert [text.split() for text in numeric] == [cells[i].split() for i in (0, 1, 3)]
