"""What a report says in words: headings that tell sections apart, notes said once, bits explained, commands."""

import json
import re
from dataclasses import replace

from run_fixtures import Run, quantized, write_run

from fc_eval.report.build import build_report
from fc_eval.report.groups import group_pairs
from fc_eval.report.guide import guide
from fc_eval.report.provenance import runs_table
from fc_eval.report.terminal import terminal_table
from fc_eval.results.compare import pair_runs
from fc_eval.results.record import load_run, load_runs


def groups_of(tmp_path, *runs):
    return group_pairs(pair_runs([load_run(write_run(tmp_path, run)) for run in runs]))


def test_a_configuration_that_is_none_leaves_the_command_open(tmp_path):
    record = load_run(write_run(tmp_path, Run()))
    for tree in ({}, {"config": 5}, {"config": {"model": 3}}, {"config": record.config["config"] | {"comm": None}}):
        assert runs_table([replace(record, config=tree)]).texts()[0][-1].startswith("unknown: its config.yaml")


def test_sections_of_one_title_say_in_what_they_differ(tmp_path):
    bases = [Run(), Run(windows=8), Run(protocol={"bos": True}), Run(tp=2), Run(tp=2, windows=8)]
    runs = tmp_path / "runs"
    for base in bases:
        write_run(runs, base)
        write_run(runs, quantized(base, "int4", 4.25, 0.01 * base.tp, protocol=base.protocol))
    report = build_report(runs, tmp_path / "out")
    text = report.markdown.read_text()
    titles = re.findall(r"^## (smollm2.*)$", text, re.M)
    assert sorted(titles) == [
        "smollm2, bf16, tp=2, cpu; eval.wikitext2.limit=16, wikitext2 bos=false",
        "smollm2, bf16, tp=2, cpu; eval.wikitext2.limit=8, wikitext2 bos=false",
        "smollm2, bf16, tp=4, cpu; eval.wikitext2.limit=16, wikitext2 bos=false",
        "smollm2, bf16, tp=4, cpu; eval.wikitext2.limit=16, wikitext2 bos=true",
        "smollm2, bf16, tp=4, cpu; eval.wikitext2.limit=8, wikitext2 bos=false",
    ]
    # One curve per limit, of the two sizes that share everything else, each in files of its own.
    assert len({path.name for path in report.plots}) == len(report.plots)
    across = re.findall(r"\*Paired delta on wikitext2 over the tensor-parallel size, 95 % intervals; (.*)\.\*", text)
    assert across == [
        "smollm2, bf16, cpu; eval.wikitext2.limit=16, wikitext2 bos=false",
        "smollm2, bf16, cpu; eval.wikitext2.limit=8, wikitext2 bos=false",
    ]


def test_groups_that_no_setting_tells_apart_name_their_baseline(tmp_path):
    bases = [Run(), Run(shift=0.5)]
    titles = [group.title for group in groups_of(tmp_path, *bases)]
    assert sorted(titles) == sorted(f"smollm2, bf16, tp=4, cpu; baseline {b.fingerprint[:10]}" for b in bases)


def test_what_all_runs_say_of_a_model_is_said_once(tmp_path):
    note = "dequantized from Q4_1"
    bases = [Run(notes=(note,)), Run(tp=2, notes=(note, "reference codec"))]
    for base in bases:
        write_run(tmp_path / "runs", base)
        write_run(tmp_path / "runs", quantized(base, "int4", 4.25, 0.02, notes=base.notes))
    report = build_report(tmp_path / "runs", tmp_path / "out")
    for text in (report.markdown.read_text(), report.html.read_text()):
        assert text.count(note) == 1
        assert text.count("reference codec") == 1
    assert terminal_table(load_runs(tmp_path / "runs")[0]).endswith(f"\n\nsmollm2: {note}; reference codec")


def test_bits_above_nominal_are_explained_by_the_padding(tmp_path):
    base = Run()
    path = write_run(tmp_path, quantized(base, "int4", 4.72, 0.02))
    result = json.loads((path / "result.json").read_text())
    result["wire"]["nominal_bits"] = 4.25
    (path / "result.json").write_text(json.dumps(result))
    record = load_run(path)
    assert "padding" not in _bits_entry(load_run(write_run(tmp_path, base))).partition("padding counted")[2]
    config = {"config": {"model": {"shape": {"hidden": 576}}}}
    expected = (
        "Here INT4 g128 costs 4.72 instead of 4.25, because 576 values a row are no multiple of 128 and fill 5 groups."
    )
    assert _bits_entry(replace(record, config=config)).endswith(expected)
    assert _bits_entry(record).endswith("because rows and messages are filled up to whole groups and blocks.")


def _bits_entry(record):
    return dict(guide(group_pairs(pair_runs([record]))))["bits"]
