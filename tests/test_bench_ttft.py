"""The prefill that `bench ttft` times: its parts, its check, and the rows that predictions read."""

import csv

import pytest
import torch
from test_cli import run_cli

from fc_eval.bench.prefill import RankPrefill, _linear
from fc_eval.bench.ttft import COLUMNS, _check
from fc_eval.errors import FcEvalError
from fc_eval.models.config import Shape
from fc_eval.predict.machine import find_gpu
from fc_eval.predict.rows import read_rows
from fc_eval.predict.work import Prefill, layer_products

SHAPE = Shape(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2)
CPU = torch.device("cpu")
SMALL = ["model=tiny", "device=cpu", "reducer=torch", "tp=2", "batch=1", "tokens=20", "vocabulary=64", "rounds=1"]


class OneRank:
    """Ranks that are alone, for what they tell each other."""

    rank, world_size = 0, 2

    def gather(self, value):
        return [value]


def model(weights="bf16"):
    return RankPrefill(Prefill(SHAPE, 2, 1, 20, weights, vocabulary=64), 0, CPU)


@pytest.mark.parametrize("weights", ["bf16", "w8a8"])
def test_the_products_that_run_are_those_that_are_counted(weights):
    rank, calls = model(weights), []
    logits, hidden = rank(rank.ids(1, 20), lambda partial: calls.append(partial.shape) or partial)
    assert logits.shape == (1, 32)
    assert calls == [(20, 32)] * 4
    assert torch.isfinite(hidden.float()).all()
    for layer in rank._layers:
        ran = {name: tuple(getattr(weight, "codes", weight).shape) for name, weight in layer.items()}
        assert ran == {each.name: (each.n, each.k) for each in layer_products(rank.prefill)}


def test_int8_products_take_a_single_token():
    rank = model("w8a8")
    logits, _ = rank(rank.ids(1, 1), torch.clone)
    assert torch.isfinite(logits.float()).all()


def test_a_token_sees_none_after_it_and_all_before():
    rank = model()
    ids = rank.ids(1, 20)
    other = ids.clone()
    other[0, 10] = (other[0, 10] + 1) % 64
    (_, a), (_, b) = rank(ids, torch.clone), rank(other, torch.clone)
    same = (a == b).all(1)
    assert same[:10].all()
    assert not same[10:].any()


def test_int8_products_are_near_those_of_their_values():
    rank = model("w8a8")
    weight, x = rank._layers[0]["qkv"], torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    exact = x @ (weight.codes.float() * weight.scale[:, None]).t()
    error = (_linear(x.to(torch.bfloat16), weight).float() - exact).norm() / exact.norm()
    assert error < 0.02  # bf16 rounds x and the result to 0.4 %, codes of 127 steps to 0.5 % of a row's peak


def test_parts_are_timed_only_while_the_watch_is_on():
    rank = model()
    rank(rank.ids(1, 20), torch.clone)
    assert rank.watch.take_ms() == {}
    rank.watch.on = True
    rank(rank.ids(1, 20), torch.clone)
    assert set(rank.watch.take_ms()) == {"gemm_ms", "attention_ms", "comm_ms"}
    assert rank.watch.take_ms() == {}


def test_one_wrong_value_is_an_error_and_no_row():
    rank = model()
    _check(rank, OneRank(), "int4", torch.clone, torch.clone)

    def wrong(partial):
        out = partial.clone()
        out[3, 5] += 1
        return out

    with pytest.raises(FcEvalError, match=r"under int4 differ from the emulator's in \d+ bytes on rank 0"):
        _check(rank, OneRank(), "int4", wrong, torch.clone)


def test_cpu_ranks_write_rows_that_predictions_read_and_leave_alone(capsys, tmp_path):
    out = tmp_path / "ttft.csv"
    status, text, err = run_cli(capsys, "bench", "ttft", *SMALL, "comm=int8", "layers=1", f"out={out}")
    assert status == 0, err
    with out.open() as file:
        plain, int8 = csv.DictReader(file)
    assert tuple(plain) == COLUMNS
    assert (plain["algorithm"], int8["algorithm"]) == ("gloo", "two_step (unfused)")
    assert (plain["model"], plain["ratio_to_nccl"]) == ("tiny[1 layers]", "1.000")
    ratio = float(plain["ttft_ms"]) / float(int8["ttft_ms"])
    assert float(int8["ratio_to_nccl"]) == pytest.approx(ratio, rel=0.01)  # three decimals in the file
    rows = read_rows(out)
    assert rows[1].prefill.shape.layers == 1
    assert not rows[1].is_of(find_gpu("h200"), "nvlink4")
    assert "two_step (unfused)" in text


def test_no_point_is_begun_after_its_seconds_and_rows_before_are_kept(capsys, tmp_path):
    out = tmp_path / "ttft.csv"
    few = [*SMALL[:4], *SMALL[6:], "comm=int8", "layers=1", "points=1x20,2x20", f"out={out}"]
    status, _, err = run_cli(capsys, "bench", "ttft", *few, "seconds=0.001")
    assert status == 0, err
    assert {row.prefill.batch for row in read_rows(out)} == {1}


MISTAKES = {
    "fused on a CPU": (["device=cpu"], "reducer=fused reduces between GPUs, but device=cpu: use reducer=torch"),
    "heads": ([*SMALL, "tp=3"], "option 'tp' is given twice"),
    "split": ([*SMALL[:3], "tp=3"], "tp=3 does not divide all of 8 heads"),
    "unquantized": ([*SMALL, "comm=plain"], "comm: plain does not quantize"),
    "peer": ([*SMALL, "comm=quickreduce_q4"], "exists in emulation only"),
    "rounds": ([*SMALL[:4], "rounds=0"], "rounds=0 is not possible"),
    "points": (["points=8-512"], "points: '8-512' is no point: expected BATCHxTOKENS"),
    "weights": (["weights=int8"], "unknown weights 'int8'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence(case, capsys):
    words, sentence = MISTAKES[case]
    status, _, err = run_cli(capsys, "bench", "ttft", *words)
    assert status == 2
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_machine_without_gpus_is_told_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = run_cli(capsys, "bench", "ttft")
    assert status == 2
    assert "bench ttft needs two CUDA devices or more, and torch sees none here" in err
