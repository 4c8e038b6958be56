"""Measured rows: how they are read, what a fit finds in them, and the error that a prediction says."""

import csv
import itertools
from dataclasses import replace

import numpy as np
import pytest

from fc_eval.collective.comm import parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.predict.fit import fit, visible
from fc_eval.predict.machine import machine
from fc_eval.predict.model import predict
from fc_eval.predict.rows import COLUMNS, PARTS, error_text, read_rows, relative_errors
from fc_eval.predict.shapes import named_shape
from fc_eval.predict.work import Prefill

TRUE = {
    "gemm_bf16": 0.62,
    "gemm_int8": 0.51,
    "attention": 0.33,
    "memory": 0.71,
    "fused": 0.49,
    "nccl": 0.77,
    "fused_us": 22.0,
    "nccl_us": 9.0,
}
NOISE = 0.02


def write_rows(path, noise=NOISE, parts=tuple(PARTS), device="NVIDIA H200", link="nvlink4", comms=None):
    """Rows that the model itself gives at the true parameters, times that are off by `noise` each."""
    rng = np.random.default_rng(0)
    there = machine("h200", values=TRUE)
    shape = named_shape("llama3_8b")
    sizes = itertools.product(
        (2, 8), ("bf16", "w8a8"), ((1, 64), (4, 512), (32, 1024)), comms or ("plain", "int8", "int4")
    )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for world_size, weights, (batch, tokens), comm in sizes:
            time = predict(Prefill(shape, world_size, batch, tokens, weights), parse_comm(comm), there)
            measured = {name: 1e3 * getattr(time, part) * np.exp(noise * rng.normal()) for name, part in PARTS.items()}
            row = {"device": device, "link": link, "world_size": world_size, "model": "llama3_8b", "weights": weights}
            row |= {"batch": batch, "input_tokens": tokens, "comm": comm, "ttft_ms": sum(measured.values())}
            writer.writerow(row | {name: measured[name] for name in parts})
    return path


@pytest.mark.parametrize("parts", [tuple(PARTS), ()])
def test_a_fit_recovers_the_parameters_within_their_errors(parts, tmp_path):
    rows = read_rows(write_rows(tmp_path / "ttft.csv", parts=parts))
    found = fit(rows, machine("h200"))
    assert (found.points, found.held_out) == (24, 12)
    assert set(found.values) == (set(TRUE) if parts else set(TRUE) - {"attention", "memory"})
    if not parts:  # what the whole time does not show is given, as a fit cannot know it
        start = machine("h200", values={name: TRUE[name] for name in ("attention", "memory")})
        found = fit(rows, start)
    for name, value in found.values.items():
        # Four standard errors: one parameter in 16,000 lies further off by chance; the draw is fixed.
        assert abs(np.log(value / TRUE[name])) < 4 * found.errors[name], name
        assert found.errors[name] < (0.05 if parts else 0.5), name
    assert found.median_error < 2 * NOISE < found.median_error_before
    assert found.machine.parameters.gemm_bf16.source == "fitted to 24 measured rows"
    assert found.machine.parameters.codec == machine("h200").parameters.codec


def test_without_noise_the_parameters_come_back(tmp_path):
    found = fit(read_rows(write_rows(tmp_path / "ttft.csv", noise=0.0)), machine("h200"))
    assert found.values == pytest.approx(TRUE, rel=1e-4)  # steps end at 1e-8; parameters resemble each other
    assert found.median_error < 1e-4


def test_only_what_the_rows_show_is_free(tmp_path):
    rows = read_rows(write_rows(tmp_path / "ttft.csv", comms=("plain",), parts=("gemm_ms",)))
    assert visible(rows, machine("h200")) == ("gemm_bf16", "gemm_int8", "nccl", "nccl_us")
    large = [row for row in rows if row.prefill.rows > 4096]
    assert "nccl_us" not in visible(large, machine("h200"))


def test_what_a_fit_refuses(tmp_path):
    rows = read_rows(write_rows(tmp_path / "ttft.csv"))
    with pytest.raises(FcEvalError, match=r"5 measured rows cannot fit 7 parameters .* expected 11 or more"):
        fit(rows[:5], machine("h200"))
    with pytest.raises(FcEvalError, match="unknown parameter 'gem'"):
        fit(rows, machine("h200"), free=("gem",))
    same = [row for row in rows if row.comm == parse_comm("plain")]
    with pytest.raises(FcEvalError, match="cannot tell nccl, fused apart"):
        fit(same, machine("h200"), free=("nccl", "fused"))


def test_a_prediction_says_its_error_where_it_was_measured(tmp_path):
    rows = read_rows(write_rows(tmp_path / "ttft.csv", noise=0.0))
    there = machine("h200", values=TRUE)
    assert error_text(there, rows) == "median error 0.0 % (largest 0.0 %) on 36 measured points"
    assert max(relative_errors(rows, there)) < 1e-9  # decimals of the file
    assert "median error" in error_text(machine("h200"), rows)
    for other in (machine("h100"), machine("h200", "pcie")):
        assert error_text(other, rows) == "no measured time to first token for this machine"


def test_a_bench_that_says_peer_means_the_gpus_own_link(tmp_path):
    rows = read_rows(write_rows(tmp_path / "ttft.csv", link="peer"))
    assert "on 36 measured" in error_text(machine("h200"), rows)
    assert "no measured" in error_text(machine("h200", "pcie"), rows)


def test_rows_of_a_part_of_the_layers(tmp_path):
    path = write_rows(tmp_path / "ttft.csv")
    path.write_text(path.read_text().replace("llama3_8b", "llama3_8b[4 layers]"))
    assert {row.prefill.shape.layers for row in read_rows(path)} == {4}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("ttft_ms", "ttft", "lacks the columns ttft_ms"),
        ("llama3_8b", "llama3_8x", "line 2: unknown model 'llama3_8x'"),
        (",plain,", ",plane,", "line 2: unknown comm 'plane'"),
        ("NVIDIA H200,nvlink4,2,", "NVIDIA H200,nvlink4,two,", "line 2: invalid literal"),
        (",bf16,1,", ",bf16,0,", "line 2: batch=0 is not possible"),
    ],
)
def test_a_row_that_does_not_read_is_one_sentence(old, new, sentence, tmp_path):
    path = write_rows(tmp_path / "ttft.csv")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FcEvalError, match=sentence):
        read_rows(path)


@pytest.mark.parametrize("column", ["ttft_ms", "comm_ms"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_time_that_is_none_is_one_sentence(column, value, tmp_path):
    path = write_rows(tmp_path / "ttft.csv")
    head, first, *rest = path.read_text().splitlines()
    cells = first.split(",")
    cells[COLUMNS.index(column)] = value
    path.write_text("\n".join([head, ",".join(cells), *rest]))
    with pytest.raises(FcEvalError, match="line 2: a time is not above 0, or not finite"):
        read_rows(path)


def test_a_fit_to_the_shortest_time_that_a_float_holds_stays_finite(tmp_path):
    row = read_rows(write_rows(tmp_path / "ttft.csv", parts=()))[0]
    (residual,) = replace(row, ttft_ms=5e-324).residuals(machine("h200"))
    # ln 2^1074 = 744.4, and a prefill of 64 tokens takes 1 to 100 ms.
    assert 744.4 < residual < 744.5 + np.log(100)
