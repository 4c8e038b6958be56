"""A hardware file for `fc-eval predict gpu=FILE`: the rates of this machine, or parameters fitted to measured rows.

    fc-eval calibrate [out=hardware.yaml]                          measures this machine's GPUs (device=cpu: its CPU)
    fc-eval calibrate rows=bench/ttft.csv gpu=h200 [link=nvlink] [out=fitted.yaml]
    fc-eval calibrate rows=reports/fused/allreduce.csv gpu=h200    of single all-reduces: the link and the codec alone

Measured: a bf16 and an INT8 product of an MLP's size, causal attention, a copy in memory, the codec of this
installation, and with two GPUs or more a copy from each to the next one and NCCL's all-reduce, small and large. These
are rates that were reached, so their shares in the file are 1. What is not measured keeps its preset value and source.

Fitted: shares and latencies by least squares to two thirds of the rows of that GPU and link; the rest tests them, and
`predict` says the error on these with every prediction.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fc_eval.bench.options import describe_options, read_options
from fc_eval.errors import FcEvalError, os_error, unknown
from fc_eval.predict.calls import Call, read_calls
from fc_eval.predict.fit import Fit, fit
from fc_eval.predict.machine import GROUP, Fitted, Gpu, Machine, machine
from fc_eval.predict.rows import Row, read_rows
from fc_eval.presets import preset
from fc_eval.results.measured_csv import read_measured
from fc_eval.results.text import text_table
from fc_eval.wire.format import parse_format

if TYPE_CHECKING:
    from fc_eval.bench.link import LinkTimes
    from fc_eval.bench.rates import Rates

MEASURED = "measured by `fc-eval calibrate`"
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class CalibrateOptions:
    """What `fc-eval calibrate` is asked for."""

    device: str = field(default="cuda", metadata={"help": "cuda or cpu"})
    format: str = field(default="int4-g128", metadata={"help": "whose codec is timed"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: torch's)"})
    rows: Path | None = field(default=None, metadata={"help": "measured times to fit to, instead of measuring"})
    gpu: str = field(default="", metadata={"help": "with rows: whose, and the rates to start from"})
    link: str | None = field(default=None, metadata={"help": "with rows: whose (default: the GPU's faster one)"})
    free: tuple[str, ...] = field(
        default=(), metadata={"help": "with rows: parameters to fit (default: all that show)"}
    )
    out: Path = field(default=Path("hardware.yaml"), metadata={"help": "the hardware file"})

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise unknown("device", self.device, DEVICES)
        parse_format(self.format)
        if self.rows is not None and not self.gpu:
            raise FcEvalError(f"rows={self.rows} needs gpu=NAME, whose rows are to be fitted")
        if self.rows is None and (self.gpu or self.link or self.free):
            raise FcEvalError("gpu, link and free belong to a fit: give rows=FILE too, or leave them out")


def calibrate(words: Sequence[str]) -> int:
    """`fc-eval calibrate`; returns the exit status.

    Raises:
        FcEvalError: an unknown option, no GPU here, or rows that cannot be fitted.
    """
    if any(word in ("-h", "--help") for word in words):
        print(f"{(__doc__ or '').strip()}\n\noptions and their defaults:\n{describe_options(CalibrateOptions)}")
        return 0
    options = read_options(CalibrateOptions, words)
    command = f"fc-eval calibrate {' '.join(words)}".rstrip()
    if options.rows is not None:
        text, row = _fitted(options, options.rows)
    else:
        text, row = _measured(options)
    write_hardware(options.out, row, f"{command}, {time.strftime('%Y-%m-%d')}")
    link = "" if row.link or row.nvlink is not None or row.pcie is not None else " link=NAME"
    use = f"fc-eval predict gpu={options.out}{link} model=llama3_8b tp=4"
    print(f"{text}\n\nwritten: {options.out}; use it as in {use}")
    return 0


def write_hardware(path: Path, row: Gpu, comment: str) -> None:
    """Writes a file that `predict gpu=FILE` takes; what is not known is left out.

    Raises:
        FcEvalError: it cannot be written.
    """
    tree = {key: value for key, value in asdict(row).items() if value not in (None, {})}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {comment}\n{yaml.safe_dump(tree, sort_keys=False, width=200)}", encoding="utf-8")
    except OSError as error:
        raise os_error(error, path, "choose another file with out=FILE") from None


def _fitted(options: CalibrateOptions, path: Path) -> tuple[str, Gpu]:
    start = machine(options.gpu, options.link)
    own = [row for row in _read(path) if row.is_of(start.gpu, start.link.name)]
    if not own:
        raise FcEvalError(
            f"{path} has no row of {start.label}: measure some with `fc-eval bench ttft`, or name another one"
        )
    found = fit(own, start, options.free)
    what = "all-reduces" if isinstance(own[0], Call) else "prefills"
    return fit_text(found, start, what), fitted_gpu(found, what)


def _read(path: Path) -> Sequence[Row | Call]:
    """Rows of `bench ttft`, or of `bench allreduce` by its columns."""
    of_calls: list[bool] = []
    read_measured(path, lambda names: of_calls.append("implementation" in names))
    return read_calls(path) if of_calls[0] else read_rows(path)


def fitted_gpu(found: Fit, what: str) -> Gpu:
    """The machine of a fit as one row: its GPU, its link, the parameters of both, and what the fit says of itself."""
    where = found.machine
    link = {"name": where.link.name, "gb_per_s": where.link.gb_per_s, "source": where.link.source}
    said = Fitted(found.points, found.held_out, round(found.median_error, 4), what)
    return replace(where.gpu, link=link, parameters=asdict(where.parameters), fitted=said)


def fit_text(found: Fit, start: Machine, what: str) -> str:
    """The fitted parameters with their errors, and how well the rows that were held out are predicted."""
    rows = []
    for name, value in found.values.items():
        before = getattr(start.parameters, name).value
        over = "more than the data sheet's rate" if value > 1 and not name.endswith("_us") else ""
        rows.append([name, f"{before:g}", f"{value:.3g}", f"{100 * found.errors[name]:.1f} %", over])
    table = text_table(["parameter", "before", "fitted", "standard error", ""], rows)
    return (
        f"{start.label}: fitted to {found.points} {what}\n\n{table}\n\n"
        f"median error of the time of {found.held_out} {what} that were held out: "
        f"{100 * found.median_error:.1f} % ({100 * found.median_error_before:.1f} % before the fit)"
    )


def _measured(options: CalibrateOptions) -> tuple[str, Gpu]:
    import torch

    from fc_eval.bench.group import in_group
    from fc_eval.bench.link import measure_link
    from fc_eval.bench.machine import device_name, device_of, use_threads
    from fc_eval.bench.rates import CPU_SIZES, GPU_SIZES, measure_rates

    if options.device == "cuda" and not torch.cuda.is_available():
        raise FcEvalError(
            "calibrate measures GPUs, and torch sees no CUDA device here: run it on the machine that predictions are "
            "for (two GPUs or more for its link), or use device=cpu for products, copies and codec of this CPU alone"
        )
    device = device_of(options.device)
    use_threads(options.threads)
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    rates = measure_rates(device, sizes, parse_format(options.format))
    times = None
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        times = in_group("cuda", torch.cuda.device_count(), measure_link)
    row = measured_gpu(device_name(device), rates, times)
    if device.type == "cuda":
        row = replace(row, memory_gb=round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1))
    return _measured_text(row, rates, times), row


def measured_gpu(name: str, rates: "Rates", times: "LinkTimes | None") -> Gpu:
    """The row of measured rates; the link is left out where there was none to measure."""
    codec = f"{MEASURED}: {rates.codec} codec, {rates.codec_gb_per_s:.4g} GB/s"
    parameters: dict[str, dict[str, Any]] = {
        "gemm_bf16": _said(1.0, MEASURED),
        "attention": _said(rates.attention_tflops / rates.bf16_tflops, MEASURED),
        "memory": _said(1.0, f"{MEASURED}: a copy"),
        "codec": _said(rates.codec_gb_per_s / rates.copy_gb_per_s, codec),
    }
    if rates.int8_tops is not None:
        parameters["gemm_int8"] = _said(1.0, MEASURED)
    link = None
    if times is not None and times.copy_gb_per_s is not None:
        link = {
            "name": "measured",
            "gb_per_s": _short(times.copy_gb_per_s),
            "source": f"{MEASURED}: copies to the next GPU",
        }
        parameters |= _link_parameters(times, times.copy_gb_per_s)
    return Gpu(
        name=name,
        source=MEASURED,
        bf16_tflops=_short(rates.bf16_tflops),
        int8_tops=None if rates.int8_tops is None else _short(rates.int8_tops),
        memory_gb_per_s=_short(rates.copy_gb_per_s),
        device=name,
        link=link,
        parameters=parameters,
    )


def _link_parameters(times: "LinkTimes", copy_gb_per_s: float) -> Mapping[str, dict[str, Any]]:
    """NCCL's share of a copy's rate from the large all-reduce, its latencies scaled to the small one.

    How the small one's time divides into a fixed part and steps is not measured; the presets' division is kept.
    """
    ranks = times.world_size
    steps = 2 * (ranks - 1)
    assumed = {name: preset(GROUP, "parameters")[name]["value"] for name in ("nccl_us", "step_us")}
    scale = times.small_us / (assumed["nccl_us"] + steps * assumed["step_us"])
    how = f"{MEASURED}: {times.small_us:.1f} us for a small all-reduce of {ranks} ranks, divided as in the presets"
    moved_us = max(times.large_us - times.small_us, 1e-3 * times.large_us)
    share = steps / ranks * times.large_bytes / moved_us / 1e3 / copy_gb_per_s
    return {
        "nccl": _said(share, f"{MEASURED}: all-reduce of {times.large_bytes >> 20} MiB, {ranks} ranks"),
        "fused": _said(share, "assumed: that of NCCL"),
        **{name: _said(scale * value, how) for name, value in assumed.items()},
    }


def _said(value: float, source: str) -> dict[str, Any]:
    return {"value": _short(value), "source": source}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _measured_text(row: Gpu, rates: "Rates", times: "LinkTimes | None") -> str:
    lines = [
        ["products, bf16", f"{row.bf16_tflops:g} TFLOPS"],
        ["products, INT8", "not measured" if row.int8_tops is None else f"{row.int8_tops:g} TOPS"],
        ["attention, bf16", f"{rates.attention_tflops:.4g} TFLOPS"],
        ["copy", f"{row.memory_gb_per_s:g} GB/s"],
        [f"codec ({rates.codec})", f"{rates.codec_gb_per_s:.4g} GB/s"],
    ]
    if times is None or row.link is None:
        lines.append(["link", "not measured: it needs two GPUs or more; give link=NAME to predict"])
    else:
        lines.append([f"link, {times.world_size} GPUs", f"{row.link['gb_per_s']:g} GB/s each way"])
        lines.append(
            ["NCCL", f"{row.parameters['nccl']['value']:.0%} of it, {times.small_us:.1f} us for a small all-reduce"]
        )
    return f"{row.name}\n\n{text_table(['what', 'reached'], lines)}"
