"""Layer errors in records and reports: read with suspicion, shown by stage and by layer."""

import math

import pandas as pd
import pytest
from layer_fixtures import add_layers, rows
from run_fixtures import Run, quantized, write_run

from fc_eval.report.build import build_report
from fc_eval.report.groups import group_pairs
from fc_eval.report.layers import layer_tables
from fc_eval.results.compare import pair_runs, render_comparison
from fc_eval.results.layers import Layers, layers_csv, read_layers
from fc_eval.results.record import load_run, load_runs, read_run

INT4 = "two_step:int4-g128-asym"


def mse(kind, layer, mode, part):
    return (10 if kind == "down_proj" else 1) * 1e-3 * (layer + 1) * (2 if mode == "accumulated" else 1)


@pytest.fixture
def runs(tmp_path):
    base = Run()
    int4, int8 = quantized(base, "int4", 4.25, 0.02), quantized(base, "int8", 8.25, 0.0004)
    add_layers(write_run(tmp_path / "runs", base), "fp32_ordered", lambda *_: 0.0)
    add_layers(write_run(tmp_path / "runs", int4), INT4, mse)
    add_layers(write_run(tmp_path / "runs", int8), "two_step:int8-g128-asym", lambda *key: mse(*key) / 256)
    return tmp_path / "runs"


def test_rows_read_back_as_they_were_written(tmp_path):
    written = rows(INT4, lambda *key: 1 / 3 * mse(*key))
    (tmp_path / "layers_x.csv").write_bytes(layers_csv(written))
    table = read_layers(tmp_path, "x").table
    assert table["mse"].tolist() == [row["mse"] for row in written]
    assert table["sqnr_db"].tolist() == [row["sqnr_db"] for row in written]
    assert table["site"].tolist() == [row["site"] for row in written]


def test_summary_of_layers():
    summary = Layers(pd.DataFrame(rows(INT4, mse))).summary().set_index(["kind", "mode", "part"])
    row = summary.loc[("down_proj", "isolated", "gather")]
    assert row["mse"] == pytest.approx(0.02, rel=1e-14)  # the mean of 0.01, 0.02, 0.03
    assert row["relative_error"] == pytest.approx(math.sqrt(0.02), rel=1e-14)  # decimal fractions, rounded
    assert row["sqnr_db"] == pytest.approx(-10 * math.log10(0.02), rel=1e-14)  # as above
    assert row["cosine"] == 1 - 0.03 / 2
    assert (row["saturated_codes"], row["zero_range_groups"]) == pytest.approx((0.005, 0.1), rel=1e-14)  # as above
    assert math.isnan(summary.loc[("down_proj", "isolated", "output"), "saturated_groups"])
    exact = Layers(pd.DataFrame(rows("fp32_ordered", lambda *_: 0.0))).summary()
    assert set(exact["sqnr_db"]) == {math.inf}


def test_records_hold_layers_and_pair_all_the_rest(runs):
    records, problems = load_runs(runs)
    assert not problems
    assert [set(record.layers) for record in records] == [{"layer_error"}] * 3
    for pair in pair_runs(records):
        assert not pair.problem
        assert {d.metric for d in pair.deltas} == {"perplexity"}
    base = next(record for record in records if record.is_baseline)
    assert "layer_error" not in render_comparison(base, next(r for r in records if not r.is_baseline))


@pytest.mark.parametrize("damage", ["cut off", "another number", "missing"])
def test_damaged_layers_make_a_broken_run(runs, damage):
    path = next(runs.glob("*int4*"))
    file = path / "layers_layer_error.csv"
    table = pd.read_csv(file)
    if damage == "missing":
        file.unlink()
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:200])
    else:
        table.loc[5, "mse"] *= 2
        table.to_csv(file, index=False)
    problem = read_run(path)
    assert problem.state == "broken"
    assert "layers_layer_error.csv" in problem.reason or "do not belong together" in problem.reason


def test_report_shows_layers(runs, tmp_path):
    report = build_report(runs, tmp_path / "report")
    names = {path.name for path in report.plots}
    group = "smollm2_bf16_tp4_cpu"
    assert {f"layer_error_by_stage_{group}_layer_error.svg", f"layer_error_{group}_layer_error.png"} <= names
    markdown, html = report.markdown.read_text(), report.html.read_text()
    title = "layer_error: INT4 g128, over all layers, wikitext2, 2 x 512 tokens"
    assert title in markdown
    assert title in html
    assert "layer_error: INT4 g128, SQNR in dB by layer" in markdown
    assert "| down_proj | isolated | before all-gather | 0.02 | 0.141 | 16.99 | 0.985000 | 0.500 |" in markdown
    assert "baseline (fp32 ordered), over all layers" not in markdown
    assert "**layer error**" in markdown
    svg = (tmp_path / "report/plots" / f"layer_error_by_stage_{group}_layer_error.svg").read_text()
    assert all(text in svg for text in ("RS INT4 g128", "AG INT4 g128", "AG INT8 g128", "down_proj", "o_proj"))
    table = pd.read_csv(tmp_path / "report/layers.csv")
    assert len(table) == 3 * 3 * 2 * 7
    assert table.query("label == 'INT4 g128' and mode == 'isolated' and kind == 'o_proj'")["mse"].max() == 0.003


def test_the_same_runs_give_the_same_bytes_and_old_layers_do_not_stay(runs, tmp_path):
    first = build_report(runs, tmp_path / "a")
    second = build_report(runs, tmp_path / "b")
    for name in ("layers.csv", "report.md", "report.html"):
        assert (first.html.parent / name).read_bytes() == (second.html.parent / name).read_bytes()
    write_run(tmp_path / "others", Run())
    build_report(tmp_path / "others", tmp_path / "a")
    assert not (tmp_path / "a/layers.csv").exists()


def test_layers_alone_make_a_report_too(tmp_path):
    base = Run(texts=())
    int4 = quantized(base, "int4", 4.25, 0.02)
    add_layers(write_run(tmp_path / "runs", base), "fp32_ordered", lambda *_: 0.0)
    path = add_layers(write_run(tmp_path / "runs", int4), INT4, mse)
    assert load_run(path).evals["layer_error"].samples == 2
    records, _ = load_runs(tmp_path / "runs")
    (group,) = group_pairs(pair_runs(records))
    assert len(layer_tables(group)) == 1
    assert group.samples == "wikitext2: 2 windows (partial)"
    assert "layer_error" in build_report(tmp_path / "runs", tmp_path / "report").markdown.read_text()
