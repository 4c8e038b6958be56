"""Hardware files: what is measured and fitted comes back in a prediction; what cannot be measured is said."""

import pytest
import torch
import yaml
from link_ranks import measure_and_fail
from test_cli import run_cli
from test_predict_fit import TRUE, write_rows

from fc_eval.bench import rates as rates_module
from fc_eval.bench.group import in_group
from fc_eval.bench.link import LinkTimes
from fc_eval.bench.rates import Rates, Sizes, measure_rates
from fc_eval.collective.comm import parse_comm
from fc_eval.commands.calibrate import measured_gpu, write_hardware
from fc_eval.errors import FcEvalError
from fc_eval.predict.machine import machine
from fc_eval.predict.model import all_reduce
from fc_eval.wire.format import parse_format

RATES = Rates(700.0, 1400.0, 350.0, 4000.0, 3600.0, "cuda")
# 2 * 3 / 4 of 256 MiB at 200 GB/s beside a link of 250, and 15 us for a message that is all latency.
TIMES = LinkTimes(4, 250.0, 15.0, 15.0 + 1.5 * (256 << 20) / 200e3, 256 << 20)


def test_measured_rates_are_those_that_a_prediction_uses(tmp_path):
    write_hardware(tmp_path / "mine.yaml", measured_gpu("NVIDIA Test", RATES, TIMES), "a test")
    found = machine(str(tmp_path / "mine.yaml"))
    reached = {"gemm_bf16": 700e12, "gemm_int8": 1400e12, "attention": 350e12, "memory": 4e12, "codec": 3.6e12}
    for name, rate in (reached | {"nccl": 200e9, "fused": 200e9}).items():
        assert found.per_second(name) == pytest.approx(rate, rel=1e-3)  # four digits in the file
    # The small all-reduce takes as long as it did: six steps and a fixed part.
    latency_s = all_reduce(parse_comm("plain"), 4, 1, 64, found).latency_s
    assert latency_s == pytest.approx(15e-6, rel=1e-3)  # four digits in the file
    assert found.parameters.fused.source == "assumed: that of NCCL"
    assert found.parameters.fused_us == machine("h200").parameters.fused_us


def test_without_a_second_gpu_a_prediction_asks_for_the_link(tmp_path):
    write_hardware(tmp_path / "mine.yaml", measured_gpu("NVIDIA Test", RATES, None), "a test")
    with pytest.raises(FcEvalError, match="NVIDIA Test does not say its link: give link=NAME"):
        machine(str(tmp_path / "mine.yaml"))
    assert machine(str(tmp_path / "mine.yaml"), "pcie5").link.gb_per_s == 63


def test_a_machine_without_a_gpu_is_told_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = run_cli(capsys, "calibrate", f"out={tmp_path / 'a.yaml'}")
    assert status == 2
    assert "torch sees no CUDA device here" in err
    assert "device=cpu" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "a.yaml").exists()


def test_a_cpu_is_measured_without_a_link(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("fc_eval.bench.timing.BUDGET_S", 0.01)
    monkeypatch.setattr("fc_eval.bench.timing.CPU_BYTES_IN_TURN", 1)
    monkeypatch.setattr(rates_module, "CPU_SIZES", Sizes(8, 64, 64, 1, 16, 1, 8))
    status, out, err = run_cli(capsys, "calibrate", "device=cpu", f"out={tmp_path / 'cpu.yaml'}")
    assert status == 0, err
    assert "not measured: it needs two GPUs or more" in out
    tree = yaml.safe_load((tmp_path / "cpu.yaml").read_text())
    assert "int8_tops" not in tree
    assert tree["parameters"]["codec"]["value"] > 0
    status, out, _ = run_cli(capsys, "predict", f"gpu={tmp_path / 'cpu.yaml'}", "link=pcie4", "model=smollm2", "tp=3")
    assert status == 0
    assert "measured by `fc-eval calibrate`" in out


def test_operations_and_bytes_are_counted_by_hand(monkeypatch):
    # Every call takes 1 us: 2 * 8 * 64 * 32 operations of the product, half of 2 * 2 * 2 * 16 * 16 * 128 of attention.
    monkeypatch.setattr(rates_module, "median_times_us", lambda timed, device: [1.0] * len(timed))
    sizes = Sizes(m=8, k=64, n=32, batch=1, tokens=16, heads=2, rows=8)
    found = measure_rates(torch.device("cpu"), sizes, parse_format("int4-g128"))
    assert found.bf16_tflops == pytest.approx(32768e-6)
    assert found.attention_tflops == pytest.approx(131072e-6)
    assert found.copy_gb_per_s == pytest.approx(2 * 65536e-3)
    # Values read, 4.25 bits of each written; these read and fp32 values written.
    assert found.codec_gb_per_s == pytest.approx((65536 + 2 * 17408 + 131072) / 2 * 1e-3)


def test_ranks_measure_a_link_and_a_failure_names_its_rank():
    times = r"world_size=2, copy_gb_per_s=None, small_us=\d+\.\d+, large_us=\d+\.\d+, large_bytes=4096"
    with pytest.raises(FcEvalError, match=rf"between 2 ranks failed: rank \d: LinkTimes\({times}\)"):
        in_group("cpu", 2, measure_and_fail)
    with pytest.raises(FcEvalError, match="99 ranks need 99 CUDA devices"):
        in_group("cuda", 99, measure_and_fail)


def test_a_fit_becomes_a_hardware_file_that_says_its_error(capsys, tmp_path):
    rows, out = write_rows(tmp_path / "ttft.csv"), tmp_path / "fitted.yaml"
    status, text, _ = run_cli(capsys, "calibrate", f"rows={rows}", "gpu=h200", f"out={out}")
    assert status == 0
    assert "of 12 prefills that were held out" in text
    found = machine(str(out))
    assert found.link.name == "nvlink4"
    for name in ("gemm_bf16", "nccl", "memory"):
        assert getattr(found.parameters, name).value == pytest.approx(TRUE[name], rel=0.05)  # of a few percent of noise
    text = run_cli(capsys, "predict", f"gpu={out}")[1]
    assert "fitted to 24 measured prefills; median error" in text
    assert "on 12 others" in text


MISTAKES = {
    "rows without gpu": (["rows=ttft.csv"], "rows=ttft.csv needs gpu=NAME"),
    "gpu without rows": (["gpu=h200"], "gpu, link and free belong to a fit: give rows=FILE too"),
    "device": (["device=gpu"], "unknown device 'gpu'"),
    "format": (["format=int44"], "unknown format 'int44'"),
    "no such rows": (["rows=/nonexistent/ttft.csv", "gpu=h200"], "/nonexistent/ttft.csv: No such file"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence(case, capsys):
    words, sentence = MISTAKES[case]
    status, _, err = run_cli(capsys, "calibrate", *words)
    assert status == 2
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_rows_of_another_machine_are_not_fitted(capsys, tmp_path):
    rows = write_rows(tmp_path / "ttft.csv")
    status, _, err = run_cli(capsys, "calibrate", f"rows={rows}", "gpu=l40", f"out={tmp_path / 'a.yaml'}")
    assert status == 2
    assert "has no row of L40, pcie4" in err
