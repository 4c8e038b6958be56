"""Sections on experiments: which runs belong to one, what stands beside them, the tables and plots of the papers."""

import math
from dataclasses import replace

import pytest
from run_fixtures import Run, Task, quantized, write_run
from test_report import Page

from fc_eval.cli import main
from fc_eval.collective.comm import parse_comm
from fc_eval.collective.traffic import traffic_of
from fc_eval.cost import costs
from fc_eval.errors import FcEvalError
from fc_eval.experiment import experiment
from fc_eval.report.build import build_report
from fc_eval.report.experiments import experiment_section
from fc_eval.report.groups import group_pairs
from fc_eval.report.pareto import budget_table, candidates, equal_table, front, front_table
from fc_eval.report.plot_accuracy import accuracy_plots
from fc_eval.report.plot_group_size import group_size_plots
from fc_eval.report.plot_pareto import pareto_plots
from fc_eval.results.compare import pair_runs
from fc_eval.results.record import load_run
from fc_eval.results.table import FIVE_TASKS


def groups_of(tmp_path, *runs):
    return group_pairs(pair_runs([load_run(write_run(tmp_path, run)) for run in runs]))


def grid(base, **changes):
    """INT8 and INT4 in groups of 128 and 32; finer groups and more bits lose less."""
    return [
        quantized(base, f"int{b}", b + 32 / g, 0.001 * 2 ** (8 - b) * g / 32, group=g, **changes)
        for b in (8, 4)
        for g in (128, 32)
    ]


def table_texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_a_section_holds_the_runs_of_its_comms_policies_and_evaluations(tmp_path):
    base = Run(texts=("wikitext2", "c4"))
    arms = [*grid(base), quantized(base, "int4_int8", 6.25, 0.01), quantized(base, "int4", 4.25, 0.01, policy="mine")]
    (group,) = groups_of(tmp_path, base, *arms)
    section = experiment_section(experiment("flash_c4_perplexity"), [group])
    (part,) = section.parts
    assert [row[0] for row in table_texts(part.summary)] == [
        "baseline (fp32 ordered)",
        "INT8 g128",
        "INT6 (INT4 reduce, INT8 gather) g128",
        "INT4 g128",
    ]
    assert {column.over for column in part.summary.columns if column.over} == {"c4 (subset) (partial)"}
    facts = dict(section.facts)
    assert facts["Not run"] == "1 of 4 comms: plain."
    assert "Measured otherwise" not in facts
    assert facts["Command"] == "fc-eval run -m experiment=flash_c4_perplexity model=smollm2"
    assert all(plot.name.startswith("flash_c4_perplexity_") for plot in section.plots)
    assert experiment_section(experiment("mx_format_sweep"), [group]) is None


def test_other_evaluations_than_the_experiments_own_are_said(tmp_path):
    base = Run(texts=("text",))
    groups = groups_of(tmp_path, base, quantized(base, "int4", 4.25, 0.02))
    facts = dict(experiment_section(experiment("flash_c4_perplexity"), groups).facts)
    assert facts["Measured otherwise"] == "with text; the experiment's own: c4."


def test_published_numbers_stand_beside_ours_where_the_model_is_the_same(tmp_path):
    base = Run(texts=("c4",), model="llama3_8b", partial=False, mean_nll=math.log(9))
    groups = groups_of(tmp_path, base, quantized(base, "int4", 4.25, 0.09))
    section = experiment_section(experiment("flash_c4_perplexity"), groups)
    ((title, table),) = section.tables
    assert title == "Published numbers"
    rows = {(row[0], row[1], row[2]): row for row in table_texts(table)}
    ours = rows["llama3_8b", "W8A8 (SmoothQuant; inferred)", "INT4 g128"]
    assert ours[4] == "9.85"
    assert ours[5].endswith("(tp=4, native weights)")
    value = groups[0].pairs[1].deltas[0].value
    assert float(ours[5].split()[0]) == pytest.approx(value, abs=5e-4)  # printed with three decimals
    assert rows["llama3_8b", "native", "baseline (fp32 ordered)"][5].endswith("(tp=4)")
    assert rows["llama2_7b", "native", "baseline (fp32 ordered)"][5] == "not run"


def test_the_cost_table_is_flash_communications(tmp_path):
    """Its comparison: W - 1 steps a stage in a ring and 1 in the two-step, W rounds and 2, equal volume."""
    found = {
        (c.label, c.world_size): c for c in costs(["int4", "ring_int4", "one_step:int4"], [2, 4, 8], 2048, 4096, "bf16")
    }
    for world_size in (2, 4, 8):
        two_step, ring, one_step = (
            found[label, world_size] for label in ("INT4 g128", "ring INT4 g128", "one-step INT4 g128")
        )
        assert (two_step.steps, ring.steps, one_step.steps) == (2, 2 * (world_size - 1), 1)
        assert (two_step.qdq_rounds, ring.qdq_rounds, one_step.qdq_rounds) == (2, world_size, 1)
        assert two_step.wire_bytes == ring.wire_bytes
        assert one_step.wire_bytes == two_step.wire_bytes * world_size // 2
        sent = traffic_of(parse_comm("int4"), world_size, 2048, 4096, "bf16").wire_bytes_per_rank
        assert two_step.wire_bytes == sent == 2 * (world_size - 1) * 2048 * 4096 * 4.25 / 8 / world_size
        assert two_step.wire_ratio == pytest.approx(16 / 4.25)
    bases = [Run(tp=tp) for tp in (2, 4)]
    groups = groups_of(tmp_path, *bases, *(quantized(base, "int4", 4.25, 0.02) for base in bases))
    section = experiment_section(experiment("flash_ring_two_step"), groups)
    table = dict(section.tables)["Cost of one all-reduce"]
    assert [column.title for column in table.columns][1:4] == ["W", "steps", "quantization rounds"]
    assert {row[1] for row in table_texts(table)} == {"2", "4"}
    assert len(section.across) == 1


def test_the_front_is_what_no_other_beats():
    assert front([]) == []
    assert front([(4, 0.5)]) == [0]
    assert front([(8, 0.1), (4, 0.5), (5, 0.6), (6, 0.1)]) == [1, 3]
    assert front([(4, 0.5), (4, 0.2), (math.nan, 0.0)]) == [1]


def test_front_and_budget_name_the_cheapest(tmp_path):
    base = Run()
    (group,) = groups_of(tmp_path, base, *grid(base), Run(comm="plain", label="plain", shift=1e-5).arm_of(base))
    known = candidates(group, "wikitext2")
    assert [label for label, *_ in known] == ["INT8 g32", "INT8 g128", "INT4 g32", "INT4 g128"]
    rows = table_texts(front_table(group, "wikitext2"))
    # ln ratios: INT8 0.001 (g32) and 0.004 (g128), INT4 0.016 and 0.064: finer groups and more bits both pay.
    assert [row[0] for row in rows] == ["INT4 g128", "INT4 g32", "INT8 g128", "INT8 g32"]
    assert {row[-1] for row in rows} == {"bits and bytes"}
    budgets = table_texts(budget_table(group))
    assert [(row[1], row[2]) for row in budgets] == [("1 %", "INT8 g128"), ("3 %", "INT4 g32"), ("5 %", "INT4 g32")]
    hopeless = groups_of(tmp_path / "b", base, quantized(base, "int2", 2.25, 3.0), quantized(base, "int3", 3.25, 2.0))
    assert {row[2] for row in table_texts(budget_table(hopeless[0]))} == {"none of these"}


def test_plots_are_there_where_they_show_something(tmp_path):
    base = Run(tasks={name: Task() for name in FIVE_TASKS})
    (group,) = groups_of(tmp_path, base, *grid(base, tasks={name: Task(lost=5, gained=2) for name in FIVE_TASKS}))
    (size,) = group_size_plots(group)
    assert all(text in size.svg for text in (">INT4<", ">INT8<", ">128<", ">32<"))
    (pareto,) = pareto_plots(group)
    assert all(text in pareto.svg for text in (">INT<", "bytes per rank", ">INT4 g128<"))
    (accuracy,) = accuracy_plots(group)
    assert "five-task average" in accuracy.svg
    few = replace(group, pairs=group.pairs[:2], labels=group.labels[:2])
    assert group_size_plots(few) == pareto_plots(few) == accuracy_plots(few) == []


def test_a_report_with_sections_on_experiments_is_one_sound_page(tmp_path, capsys):
    base = Run()
    for run in (base, *grid(base)):
        write_run(tmp_path / "runs", run)
    arguments = ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--experiment", "flash_wikitext2_perplexity", "--experiment", "flash2_bit_widths"]) == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"experiment-flash_wikitext2_perplexity", "experiment-flash2_bit_widths"} <= set(ids)
    linked = {a["href"][1:] for tag, a in page.tags if tag == "a"}
    assert linked <= set(ids)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## Every width from 8 to 2 bits" in text
    assert "| llama3_8b | W8A8, alpha 0.85 | baseline (fp32 ordered) | wikitext2 | 6.258 | not run |" in text
    capsys.readouterr()
    assert main([*arguments, "--experiment", "flash_wikitext"]) == 2
    assert "did you mean 'flash_wikitext2_perplexity'" in capsys.readouterr().err
    with pytest.raises(FcEvalError, match="none of these runs belongs to the experiment mx_format_sweep"):
        build_report(tmp_path / "runs", tmp_path / "other", experiments=[experiment("mx_format_sweep")])
    assert not (tmp_path / "other").exists()


def test_other_systems_stand_beside_the_best_of_ours_at_equal_cost(tmp_path):
    base = Run()
    (group,) = groups_of(tmp_path, base, *grid(base))
    assert equal_table(group, "wikitext2") is None
    other = {
        label: replace(pair.record.arm, algorithm="peer") for label, pair in zip(group.labels, group.pairs, strict=True)
    }
    pairs = tuple(
        replace(pair, record=replace(pair.record, arm=other[label])) if label in ("INT8 g128", "INT4 g128") else pair
        for label, pair in zip(group.labels, group.pairs, strict=True)
    )
    rows = table_texts(equal_table(replace(group, pairs=pairs), "wikitext2"))
    assert [row[0] for row in rows] == ["INT8 g128", "INT4 g128"]
    # Of ours, INT8 g32 costs 9 bits and INT4 g32 costs 5: one fits below 8.25, none below 4.25.
    assert [row[4] for row in rows] == [row[8] for row in rows] == ["INT4 g32", "none of these"]


def test_an_experiment_with_weights_of_its_own_has_runs_with_these_alone(tmp_path):
    base = Run(texts=("c4",))
    native = groups_of(tmp_path / "native", base, quantized(base, "int4", 4.25, 0.02))
    base = replace(base, weights="W8A8 (alpha 0.85)")
    w8a8 = groups_of(tmp_path / "w8a8", base, quantized(base, "int4", 4.25, 0.02))
    found = experiment("flash_w8a8_perplexity")
    assert found.weights == "w8a8"
    assert experiment_section(found, native) is None
    section = experiment_section(found, [*native, *w8a8])
    assert [part.title for part in section.parts] == ["smollm2, bf16, W8A8 (alpha 0.85) weights, tp=4, cpu"]
    # An experiment that leaves weights to the command line has both.
    assert len(experiment_section(experiment("flash_c4_perplexity"), [*native, *w8a8]).parts) == 2


def sections(found, groups):
    return experiment_section(experiment(found), groups)


def test_where_an_experiments_own_setting_was_run_other_settings_are_not_shown(tmp_path):
    own, tp2, text = Run(), Run(tp=2), Run(texts=("c4",))
    arms = [quantized(base, "int4", 4.25, 0.02) for base in (own, tp2, text)]
    groups = groups_of(tmp_path, own, tp2, text, *arms, quantized(own, "int8", 8.25, 0.001))
    section = sections("flash_wikitext2_perplexity", groups)  # WikiText-2 at tp=4
    assert [part.title for part in section.parts] == ["smollm2, bf16, tp=4, cpu"]
    facts = dict(section.facts)
    assert facts["Run"] == "2 of 4: the rest is missing."
    assert facts["Not run"] == "2 of 4 comms: plain, INT6 (INT4 reduce, INT8 gather) g128."
    assert "Measured otherwise" not in facts
    across = sections("flash_world_size", groups)  # tp=2, 4 and 8
    assert [part.title for part in across.parts] == ["smollm2, bf16, tp=2, cpu", "smollm2, bf16, tp=4, cpu"]
    assert dict(across.facts)["Run"] == "3 of 12: the rest is missing."
    assert len(across.across) == 1


def test_the_policies_of_an_experiment_are_arms_of_their_own(tmp_path):
    base = Run(texts=("c4",))
    runs = [
        quantized(base, "int4", 4 + 32 / g, 0.02, group=g, policy=policy)
        for g in (128, 32)
        for policy in experiment("flash_fig5_layers").policies
    ]
    section = sections("flash_fig5_layers", groups_of(tmp_path, base, *runs))
    assert dict(section.facts)["Run"] == "10 of 10."


def test_runs_of_another_size_alone_are_shown_and_said(tmp_path):
    base = Run(tp=2)
    groups = groups_of(tmp_path, base, quantized(base, "int4", 4.25, 0.02))
    facts = dict(sections("flash_wikitext2_perplexity", groups).facts)
    assert facts["Run"] == "0 of 4: none in its own setting."
    assert facts["Measured otherwise"] == "with tp=2; the experiment's own: tp=4."
    assert experiment_section(experiment("flash_wikitext2_perplexity"), groups, only_own=True) is None


def test_runs_that_measured_more_besides_stand_in_one_table(tmp_path):
    """The baselines' windows are the same, so INT4 of the one and INT8 of the other are compared with one number."""
    few, more = Run(), Run(texts=("wikitext2", "c4"), batch_size=16, protocol={"window_batch": 16})
    groups = groups_of(
        tmp_path,
        few,
        more,
        quantized(few, "int4", 4.25, 0.02),
        quantized(more, "int4", 4.25, 0.02),  # the same arm twice: once in the table
        quantized(more, "int8", 8.25, 0.001),
    )
    assert len(groups) == 2
    (part,) = sections("flash_wikitext2_perplexity", groups).parts
    assert part.title == "smollm2, bf16, tp=4, cpu"
    assert [row[0] for row in table_texts(part.summary)] == ["baseline (fp32 ordered)", "INT8 g128", "INT4 g128"]
    other = replace(more, mean_nll=3.1)
    groups = groups_of(tmp_path / "b", few, other, *(quantized(base, "int4", 4.25, 0.02) for base in (few, other)))
    assert len(sections("flash_wikitext2_perplexity", groups).parts) == 2


def test_a_report_of_experiments_alone(tmp_path, capsys):
    base = Run()
    for run in (base, *grid(base)):
        write_run(tmp_path / "runs", run)
    arguments = ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--only-experiments"]
    assert main([*arguments, "--experiment", "flash_ring_two_step", "--experiment", "flash_c4_perplexity"]) == 0
    lines = (tmp_path / "out" / "report.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("## ")] == [
        "## Ring and two-step over the world size",  # flash_c4_perplexity has no runs of C4
        "## How to read this",
        "## Provenance",
    ]
    plots = [path.stem for path in (tmp_path / "out" / "plots").iterdir()]
    assert plots
    assert all(name.startswith("flash_ring_two_step_") for name in plots)
    capsys.readouterr()
    assert main(arguments) == 2
    assert "name an experiment" in capsys.readouterr().err
