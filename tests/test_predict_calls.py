"""Measured all-reduces: which rows count, what a fit finds in them, and what a prediction says of them."""

import csv

import numpy as np
import pytest
from test_cli import run_cli

from fc_eval.bench.allreduce import COLUMNS
from fc_eval.collective.comm import parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.predict.break_even import UNQUANTIZED
from fc_eval.predict.calls import HIDDEN, KEPT, Call, break_even_text, call_error_text, read_calls
from fc_eval.predict.fit import fit
from fc_eval.predict.machine import machine
from fc_eval.predict.model import all_reduce

TRUE = {"codec": 0.4, "fused": 0.6, "nccl": 0.7, "fused_us": 14.0, "nccl_us": 12.0}
NOISE = 0.01


def write_calls(path, noise=NOISE):
    """Rows that the model itself gives at the true parameters, and rows that are not about predictions."""
    rng, there = np.random.default_rng(0), machine("h200", values=TRUE)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for world_size in (2, 8):
            for rows in (8, 128, 2048, 32768):
                for name in ("plain", "int8", "int4", "int3"):
                    comm = parse_comm(name)
                    time_us = 1e6 * all_reduce(comm, world_size, rows, HIDDEN, there).total_s
                    row = {"device": "NVIDIA H200", "link": "peer", "world_size": world_size}
                    row |= {"implementation": "fused", "algorithm": comm.algorithm, "blocks": "0"}
                    row |= {"format": "/".join(fmt.name for fmt in comm.formats), "size_bytes": rows * HIDDEN * 2}
                    if name == "plain":
                        row |= {"implementation": "nccl", "algorithm": "", "blocks": ""}
                    writer.writerow(row | {"time_us": time_us * np.exp(noise * rng.normal())})
                    writer.writerow(row | {"implementation": "symm_mem_two_shot", "blocks": "", "time_us": 1.0})
                    writer.writerow(row | {"implementation": "fused", "blocks": "64", "time_us": 1.0})
    return path


def test_a_fit_of_calls_recovers_link_and_codec_within_their_errors(tmp_path):
    calls = read_calls(write_calls(tmp_path / "allreduce.csv"))
    assert len(calls) == 32
    found = fit(calls, machine("h200"))
    assert set(found.values) == set(TRUE)
    for name, value in found.values.items():
        # Four standard errors: one parameter in 16,000 lies further off by chance; the draw is fixed.
        assert abs(np.log(value / TRUE[name])) < 4 * found.errors[name], name
        assert found.errors[name] < 0.1, name
    assert found.median_error < 2 * NOISE < found.median_error_before


def test_calls_in_other_dtypes_do_not_count(tmp_path):
    path = write_calls(tmp_path / "allreduce.csv")
    head, *rows = path.read_text().splitlines()
    assert head.endswith(",dtype")
    said = [row + dtype for row, dtype in zip(rows, ["", "bf16", "fp16", "fp32"] * len(rows), strict=False)]
    path.write_text("\n".join([head, *said]))
    counted = [row for row in said if row.endswith((",", "bf16")) and (",nccl," in row or ",0," in row)]
    assert 0 < len(read_calls(path)) == len(counted) < 32


def test_a_prediction_names_the_calls_that_were_measured(tmp_path):
    calls = read_calls(write_calls(tmp_path / "allreduce.csv", noise=0.0))
    said = call_error_text(machine("h200", values=TRUE), calls)
    assert said == "measured all-reduces at W = 2, 8: median error 0 % of 8 NCCL's and 0 % of 24 quantized calls"
    assert call_error_text(machine("h200", "pcie"), calls) is None
    assert call_error_text(machine("l40"), calls) is None


def test_a_prediction_says_from_which_measured_size_on_a_comm_was_ahead():
    int4, int8, one_step = (parse_comm(name) for name in ("int4", "int8", "one_step:int4"))

    def calls(comm, *times_us):
        return [Call("NVIDIA H200", "peer", 2, comm, rows, us) for rows, us in zip((8, 16, 32), times_us, strict=True)]

    found = [
        *calls(UNQUANTIZED, 10, 20, 30),
        *calls(int4, 9, 21, 29),
        *calls(int8, 11, 19, 31),
        *calls(one_step, 9, 9, 9),
    ]
    there = machine("h200")
    assert break_even_text(there, found, [int4, int8, one_step, parse_comm("int6")], 2) == (
        "ahead of NCCL at W = 2, 64 to 256 KiB: INT4 g128 from 256 KiB; INT8 g128 never; "
        "one-step INT4 g128 from 64 KiB, the smallest"
    )
    assert break_even_text(there, found, [int4], 4) is None
    assert break_even_text(machine("l40"), found, [int4], 2) is None


def test_the_calls_of_this_project_read_and_stand_beside_its_predictions(capsys):
    assert len(read_calls(KEPT)) > 40
    assert "Beside measured all-reduces at W = 2" in run_cli(capsys, "predict", "gpu=h200", "tp=2")[1]
    assert "Measured ahead of NCCL at W = 2" in run_cli(capsys, "predict", "gpu=h200", "tp=2")[1]
    assert "Beside measured" not in run_cli(capsys, "predict", "gpu=l40", "tp=2")[1]


def test_calibrate_fits_calls_and_says_so(capsys, tmp_path):
    rows, out = write_calls(tmp_path / "allreduce.csv"), tmp_path / "fitted.yaml"
    status, text, err = run_cli(capsys, "calibrate", f"rows={rows}", "gpu=h200", f"out={out}")
    assert status == 0, err
    assert "of 10 all-reduces that were held out" in text
    assert machine(str(out)).parameters.nccl.value == pytest.approx(TRUE["nccl"], rel=0.05)  # of 1 % of noise
    assert "fitted to 22 measured all-reduces" in run_cli(capsys, "predict", f"gpu={out}")[1]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("time_us", "time", "lacks the columns time_us: expected those of bench allreduce"),
        ("int8-g128-asym", "int8-g128-asy", "unknown"),
        (",65536,", ",0,", "a size or time is not above 0"),
        (",65536,", ",many,", "invalid literal"),
        (",65536,", f",{10**30},", "a size or time is not above 0, or too large"),
        ("NVIDIA H200,peer,2,", "NVIDIA H200,peer,1,", "line 2: world_size=1 is not possible, expected 2 to 1024"),
        ("NVIDIA H200,peer,8,", "NVIDIA H200,peer,8000000,", "world_size=8000000 is not possible"),
    ],
)
def test_a_row_that_does_not_read_is_one_sentence(old, new, sentence, tmp_path):
    path = write_calls(tmp_path / "allreduce.csv")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FcEvalError, match=sentence):
        read_calls(path)


@pytest.mark.parametrize("time_us", ["0", "nan", "inf"])
def test_a_time_that_is_none_is_one_sentence(time_us, tmp_path):
    path = write_calls(tmp_path / "allreduce.csv")
    head, first, *rest = path.read_text().splitlines()
    cells = first.split(",")
    cells[COLUMNS.index("time_us")] = time_us
    path.write_text("\n".join([head, ",".join(cells), *rest]))
    with pytest.raises(FcEvalError, match="line 2: a size or time is not above 0, or too large"):
        read_calls(path)
