"""`fc-eval bench int8`: sums are checked before anything is timed, and ratios belong to one run."""

import csv

import pytest
import torch

from fc_eval.bench import int8 as int8_bench
from fc_eval.bench.command import bench
from fc_eval.errors import FcEvalError
from fc_eval.weights.int8 import int_product, quantize_rows
from fc_eval.weights.int8 import product as exact_product


def test_rows_and_ratios(tmp_path):
    out = tmp_path / "int8.csv"
    assert bench(["int8", "shapes=64x4096,8x16", "tokens=3,20", f"out={out}"]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [row["op"] for row in rows] == ["bf16", "w8a8", "product"] * 4
    assert [row["sums_checked"] for row in rows[:3]] == ["0", "192", "192"]
    assert all(row["speed_up"] == "1.000" for row in rows if row["op"] == "bf16")
    assert "fc-eval bench int8" in (tmp_path / "int8_cpu.txt").read_text()


def test_a_sum_that_is_off_by_one_is_an_error_and_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(int8_bench, "int_product", lambda a, b: int_product(a, b) + torch.eye(2, 8, dtype=torch.int32))
    with pytest.raises(FcEvalError, match="2 of 16 sums of INT8 codes and 0 outputs"):
        bench(["int8", "shapes=8x16", "tokens=2", f"out={tmp_path / 'int8.csv'}"])
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_scaled_wrongly_is_an_error(monkeypatch):
    monkeypatch.setattr(int8_bench, "product", lambda x, weight: 2 * exact_product(x, weight))
    x = torch.ones(1, 16)
    with pytest.raises(FcEvalError, match="0 of 8 sums of INT8 codes and 8 outputs"):
        int8_bench.check(x, quantize_rows(torch.ones(8, 16)))


@pytest.mark.parametrize("word", ["shapes=64", "shapes=0x16", "shapes=8x133145", "tokens=0"])
def test_what_cannot_be_timed_is_refused(word):
    with pytest.raises(FcEvalError):
        bench(["int8", word])


def test_a_file_that_rows_cannot_be_added_to_is_refused_before_anything_is_timed(tmp_path, capsys):
    path = tmp_path / "int8.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FcEvalError, match="is no CSV file"):
        bench(["int8", "device=cpu", "shapes=16x16", "tokens=1", f"out={path}"])
    assert capsys.readouterr().out == ""
    assert path.read_bytes() == b"\xff\xfe\x00"
