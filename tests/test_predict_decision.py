"""The decision page: predicted times and measured losses of the same comms side by side."""

import csv
import re

import pytest
from run_fixtures import Run, Task, quantized, write_run
from test_cli import run_cli

from fc_eval.collective.comm import parse_comm
from fc_eval.predict.command import PredictOptions, decide
from fc_eval.predict.decision import choices, front_of
from fc_eval.predict.losses import read_losses
from fc_eval.predict.machine import machine
from fc_eval.predict.shapes import named_shape
from fc_eval.predict.work import Prefill

COMMS = tuple(parse_comm(name) for name in ("int8", "int4_int8", "int4"))


def runs_of(tmp_path, **changes):
    """A baseline and three comms at W = 4, the middle one worse than the cheapest: no front has it."""
    base = Run(model="llama3_8b", tasks={"arc_easy": Task()}, device="cuda:0", **changes)
    arms = [
        quantized(base, "int8", 8.25, 0.0004, tasks={"arc_easy": Task(lost=1, gained=3)}, device="cuda:0"),
        quantized(base, "int4_int8", 6.25, 0.05, tasks={"arc_easy": Task(lost=4)}, device="cuda:0"),
        quantized(base, "int4", 4.25, 0.02, tasks={"arc_easy": Task(lost=9, gained=2)}, device="cuda:0"),
    ]
    for run in (base, *arms):
        write_run(tmp_path / "runs", run)
    return tmp_path / "runs"


def test_losses_are_those_of_the_same_comm_model_and_ranks(tmp_path):
    runs = runs_of(tmp_path)
    found = read_losses([runs], "llama3_8b", "bf16", 4, COMMS, None)
    assert found.perplexity == "wikitext2"
    assert found.title.startswith("llama3_8b, bf16, tp=4, cuda; wikitext2: 16 windows")
    sizes = [found.by_comm[comm].size for comm in COMMS]
    assert [round(size, 6) for size in sizes] == [0.0004, 0.05, 0.02]
    assert round(100 * found.by_comm[COMMS[2]].accuracy.delta, 6) == -3.5
    for other in (("llama3_70b", "bf16", 4), ("llama3_8b", "w8a8", 4), ("llama3_8b", "bf16", 8)):
        assert read_losses([runs], *other, COMMS, None) is None


def test_the_front_leaves_out_what_another_comm_beats(tmp_path):
    losses = read_losses([runs_of(tmp_path)], "llama3_8b", "bf16", 4, COMMS, None)
    found = choices(Prefill(named_shape("llama3_8b"), 4, 8, 1024), COMMS, machine("l40"), losses)
    assert [found[i].label for i in sorted(front_of(found))] == ["unquantized (NCCL ring)", "INT8 g128", "INT4 g128"]
    assert [c.speed_up for c in found] == sorted(c.speed_up for c in found)
    assert found[0].loss.perplexity.delta == 0


def test_what_no_run_measured_is_said(tmp_path, capsys):
    runs = runs_of(tmp_path)
    words = ["predict", "gpu=l40", "comm=int4,int5,int4-g32", f"runs={runs}"]
    status, out, _ = run_cli(capsys, *words)
    assert status == 0
    rows = {
        name: next(line for line in out.splitlines() if line.startswith(name))
        for name in ("INT4 g128", "INT5", "INT4 g32")
    }
    assert "not measured" not in rows["INT4 g128"]
    assert rows["INT5"].count("not measured") == rows["INT4 g32"].count("not measured") == 2
    assert "Predicted time, measured loss" in out
    other = run_cli(capsys, *words, "tp=2", "fused=1.2")[1]
    assert "No run of llama3_8b with bf16 weights at tp=2" in other
    assert "measured loss" not in other
    assert "fused above 1: more than a data sheet's rate" in other
    assert "unknown perplexity 'c4'" in run_cli(capsys, *words, "eval=c4")[2]


def test_the_page_has_table_plots_and_csv(tmp_path, capsys):
    runs, out = runs_of(tmp_path), tmp_path / "page"
    status, text, _ = run_cli(capsys, "predict", "gpu=l40", "batch=64", f"runs={runs}", f"out={out}")
    assert status == 0
    assert "no measured time to first token for this machine" in text
    page, markdown = (out / "decision.html").read_text(), (out / "decision.md").read_text()
    assert page.count("<svg") == markdown.count("](plots/") == 2
    assert "unquantized (NCCL ring)" in page
    assert all((out / "plots" / name).exists() for name in re.findall(r"plots/(\w+\.png)", markdown))
    with (out / "decision.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["link"] for row in rows} == {"pcie4"}
    assert [row["comm"] for row in rows] == ["plain", *(comm.name for comm in COMMS)]
    assert float(rows[3]["ln_ppl_ratio"]) == pytest.approx(0.02)
    base, int4 = (float(rows[i]["ttft_s"]) for i in (0, 3))
    assert float(rows[3]["speed_up"]) == base / int4


def test_notes_say_what_is_uneven_and_what_does_not_fit():
    leaflet, _ = decide(PredictOptions(gpu="l4", model="llama3_70b", tp=6))
    notes = " ".join(leaflet.notes)
    assert "tp=6 does not divide the 64 heads: the busiest rank, with 11 of them" in notes
    assert "launching its kernels" not in notes
    small, _ = decide(PredictOptions(gpu="h200", model="smollm2", tp=3, batch=1))
    assert any("launching its kernels, which the model leaves out" in note for note in small.notes)
    assert re.search(r"weights of one rank take \d+ GB, more than the 24 GB of L4", notes)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status, _, err = run_cli(capsys, "predict", "gpu=l40", f"out={tmp_path / 'file'}")
    assert status == 2
    assert "choose another folder with out=DIR" in err
