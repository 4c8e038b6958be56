"""Plots are there where they show something, and only there."""

import math
import re

from run_fixtures import Run, quantized, write_run

from fc_eval.report.figure import INK, figure_with_axes, symlog_if_wide
from fc_eval.report.groups import group_pairs
from fc_eval.report.plot_bits import bits_plots
from fc_eval.report.plot_deltas import forest_plots
from fc_eval.report.plot_grid import grid_plots
from fc_eval.report.plot_tp import tp_plots
from fc_eval.results.compare import pair_runs
from fc_eval.results.record import load_run


def groups_of(tmp_path, *runs):
    return group_pairs(pair_runs([load_run(write_run(tmp_path, run)) for run in runs]))


def test_plots_only_where_they_show_something(tmp_path):
    base = Run()
    alone = groups_of(tmp_path / "a", base)
    assert [*bits_plots(alone[0]), *grid_plots(alone[0]), *forest_plots(alone[0]), *tp_plots(alone)] == []
    one = groups_of(tmp_path / "b", base, quantized(base, "int4", 4.25, 0.02))
    assert bits_plots(one[0]) == []
    assert len(forest_plots(one[0])) == 1
    grid = [quantized(base, f"int{b}", b + 32 / g, 0.001 * 2 ** (8 - b), group=g) for b in (8, 4) for g in (32, 128)]
    full = groups_of(tmp_path / "c", base, *grid)
    assert len(bits_plots(full[0])) == 1
    assert len(grid_plots(full[0])) == 1
    lines = groups_of(tmp_path / "d", base, *(run for run in grid if "g128" in run.label))
    assert grid_plots(lines[0]) == []


def test_plot_over_tensor_parallel_sizes(tmp_path):
    bases = [Run(tp=tp) for tp in (2, 4, 8)]
    groups = groups_of(tmp_path, *bases, *(quantized(base, "int4", 4.25, 0.01 * base.tp) for base in bases))
    (plot,) = tp_plots(groups)
    assert "INT4 g128" in plot.svg
    assert tp_plots(groups[:1]) == []


def test_a_broken_arm_does_not_break_the_plots(tmp_path):
    base = Run()
    arms = [
        quantized(base, "int8", 8.25, 0.001),
        quantized(base, "int4", 4.25, 0.02),
        quantized(base, "int2", 2.25, 800.0),
    ]
    (group,) = groups_of(tmp_path, base, *arms)
    assert math.isnan(group.pairs[-1].deltas[0].value)
    assert group.pairs[-1].deltas[0].ln_ratio > 700
    assert len(bits_plots(group)) == 1
    assert len(forest_plots(group)) == 1


def test_inline_svg_takes_the_page_colour_and_has_ids_of_its_own(tmp_path):
    base = Run()
    (group,) = groups_of(tmp_path, base, quantized(base, "int4", 4.25, 0.02))
    (plot,) = forest_plots(group)
    assert INK in plot.svg
    inline = plot.inline_svg
    assert INK not in inline
    assert "currentColor" in inline
    assert "xmlns" not in inline
    ids = re.findall(r'\bid="([^"]+)"', inline)
    assert ids
    assert all(name.startswith(plot.name) for name in ids)


def test_no_number_of_a_symlog_axis_stands_on_its_zero():
    (axes,) = figure_with_axes(4.0, 2.0, 1)[1]
    axes.plot([0.004, 0.01, 3.0], [0, 1, 2])
    symlog_if_wide(axes, [0.004, 0.01, 3.0], "x")
    ticks = axes.get_xticks()
    assert 0.001 in ticks  # matplotlib's own choice, inside of the linear part
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert dict(zip(ticks.tolist(), shown, strict=True))[0.001] == ""
    assert [text for text in shown if text][:2] == ["0", "0.01"]
