"""What time to first token would be won on a machine, and what it would cost in accuracy. No GPU is needed.

    fc-eval predict model=llama3_8b gpu=l40 link=pcie tp=4 batch=64 tokens=1024 comm=int8,int4 weights=w8a8
    fc-eval predict ... runs=RUNS out=DIR     beside the losses that runs of the same model, W and comms measured
    fc-eval predict --check                   published measurements beside the model's predictions

A small cost model (`fc_eval/predict/model.py`): operations, bytes and messages are counted from the model's shape and
the comm's traffic, then divided by the rates of the machine; nothing overlaps. `gpu` is a row of
conf/hardware/gpus.yaml or a file that `fc-eval calibrate` wrote, `link` a row of links.yaml, nvlink or pcie. A
quantized comm is taken as one fused kernel, the unquantized one as NCCL's ring. Shares of peak rates and latencies are
parameters with a source each, which the last table lists; any of them can be given (gemm_bf16=0.7, step_us=2).
"""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from fc_eval.bench.options import describe_options, read_options
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError, os_error
from fc_eval.predict import calls
from fc_eval.predict.check import Checked, check, published
from fc_eval.predict.decision import Choice, choices, choices_table, parameters_table, parts_table
from fc_eval.predict.losses import Losses, read_losses
from fc_eval.predict.machine import GROUP, Machine, machine
from fc_eval.predict.plots import decision_plots
from fc_eval.predict.rows import KEPT, OWN, error_text, read_rows
from fc_eval.predict.shapes import named_shape
from fc_eval.predict.work import WIDTH, Prefill, weight_bytes
from fc_eval.presets import preset
from fc_eval.report.leaflet import Leaflet, screen_table
from fc_eval.report.tables import Cell, Column, Table

CHECK = "--check"
# Of a layer: about a dozen kernels, whose launches take some microseconds each where no graph holds them (assumed).
LAUNCHES_S = 1e-4


@dataclass(frozen=True)
class ParameterOptions:
    """Parameters of the cost model that replace those of the files, as `machine.Parameters` describes them."""

    gemm_bf16: float | None = field(default=None, metadata={"help": "share of the bf16 peak that products reach"})
    gemm_int8: float | None = field(default=None, metadata={"help": "share of the INT8 peak that products reach"})
    attention: float | None = field(default=None, metadata={"help": "share of the bf16 peak that attention reaches"})
    memory: float | None = field(default=None, metadata={"help": "share of the memory bandwidth of norms and the like"})
    codec: float | None = field(default=None, metadata={"help": "share of the memory bandwidth of the codec"})
    fused: float | None = field(
        default=None, metadata={"help": "share of the link that a quantized all-reduce reaches"}
    )
    nccl: float | None = field(default=None, metadata={"help": "share of the link that NCCL's ring reaches"})
    fused_us: float | None = field(default=None, metadata={"help": "fixed time of a quantized all-reduce"})
    nccl_us: float | None = field(default=None, metadata={"help": "fixed time of NCCL's all-reduce"})
    step_us: float | None = field(default=None, metadata={"help": "time of each exchange"})


@dataclass(frozen=True)
class PrefillOptions:
    """Which prefill, on which machine, under which comms, and beside which runs."""

    model: str = field(default="llama3_8b", metadata={"help": "a name in conf/model, or a checkpoint's folder"})
    gpu: str = field(default="", metadata={"help": "a name in conf/hardware/gpus.yaml, or a hardware file"})
    link: str | None = field(
        default=None, metadata={"help": "pcie, nvlink, or a name in links.yaml (default: the faster)"}
    )
    link_gb_per_s: float | None = field(default=None, metadata={"help": "its rate each way, instead of the file's"})
    tp: int = field(default=4, metadata={"help": "W, ranks"})
    batch: int = field(default=8, metadata={"help": "prompts"})
    tokens: int = field(default=1024, metadata={"help": "of each prompt"})
    comm: tuple[str, ...] = field(default=("int8", "int4_int8", "int4"), metadata={"help": "as in `fc-eval run comm=`"})
    weights: str = field(default="bf16", metadata={"help": "bf16 or w8a8"})
    vocabulary: int = field(default=128256, metadata={"help": "rows of the head, LLaMA-3's; hardly matters"})
    runs: tuple[Path, ...] = field(default=(), metadata={"help": "folders of `fc-eval run`: losses of the same comms"})
    eval: str | None = field(default=None, metadata={"help": "the perplexity that counts (default: the first one)"})
    measured: tuple[Path, ...] = field(
        default=(), metadata={"help": f"measured times, for the error of predictions (default: {OWN}, {KEPT})"}
    )
    out: Path | None = field(default=None, metadata={"help": "folder for decision.html, .md, .csv and plots"})


@dataclass(frozen=True)
class PredictOptions(ParameterOptions, PrefillOptions):
    """What `fc-eval predict` is asked for; the last of these classes has the first fields."""

    def __post_init__(self) -> None:
        if not self.gpu:
            known = ", ".join(preset(GROUP, "gpus"))
            raise FcEvalError(f"no gpu is given: expected gpu=NAME ({known}) or gpu=FILE of `fc-eval calibrate`")


def predict_command(words: Sequence[str]) -> int:
    """`fc-eval predict`; returns the exit status.

    Raises:
        FcEvalError: an unknown option or name, or a value that is not possible.
    """
    if any(word in ("-h", "--help") for word in words):
        print(f"{(__doc__ or '').strip()}\n\noptions and their defaults:\n{describe_options(PredictOptions)}")
        return 0
    if CHECK in words:
        print(check_text(_values(read_options(ParameterOptions, [word for word in words if word != CHECK]))))
        return 0
    options = read_options(PredictOptions, words)
    leaflet, found = decide(options)
    print(leaflet.as_text())
    if options.out is not None:
        paths = [*leaflet.write(options.out, "decision"), _write_csv(options.out / "decision.csv", options, found)]
        print(f"\nwritten: {', '.join(map(str, paths))}")
    return 0


def decide(options: PredictOptions) -> tuple[Leaflet, list[Choice]]:
    """The page that answers the options, and its rows.

    Raises:
        FcEvalError: as `predict_command`, or a time that no float holds.
    """
    where = machine(options.gpu, options.link, _values(options), options.link_gb_per_s)
    sizes = (options.tp, options.batch, options.tokens, options.weights, options.vocabulary)
    prefill = Prefill(named_shape(options.model), *sizes)
    comms = [parse_comm(name) for name in options.comm]
    losses = None
    if options.runs:
        name = Path(options.model).name
        losses = read_losses(options.runs, name, options.weights, options.tp, comms, options.eval)
    found = choices(prefill, comms, where, losses)
    if not all(math.isfinite(choice.time.total_s) for choice in found):
        raise FcEvalError("the predicted time is infinite: a rate is far too small, or a latency far too large")
    tables = [
        (
            "Predicted time, measured loss" if losses is not None else "Predicted time",
            choices_table(found, prefill.shape.hidden, losses),
        )
    ]
    tables += [
        ("Where the time goes, ms", parts_table(found)),
        ("What the prediction rests on", parameters_table(where)),
    ]
    message = prefill.rows * prefill.shape.hidden * WIDTH / 2**20
    leaflet = Leaflet(
        title=f"Quantized all-reduce: {options.model} on {options.tp} x {where.label}",
        lede=(
            f"Time to first token of {options.batch} prompts of {options.tokens} tokens, {options.weights} weights; "
            f"{2 * prefill.shape.layers} all-reduces of {message:g} MiB in bf16."
        ),
        notes=tuple(_notes(options, prefill, where, losses, comms, found[0].time.total_s)),
        tables=tuple(tables),
        plots=tuple(decision_plots(found, prefill, where, losses)) if options.out is not None else (),
    )
    return leaflet, found


def _values(options: ParameterOptions) -> dict[str, float]:
    """Parameters that were given."""
    given = {each.name: getattr(options, each.name) for each in fields(ParameterOptions)}
    return {name: value for name, value in given.items() if value is not None}


def _notes(
    options: PredictOptions,
    prefill: Prefill,
    where: Machine,
    losses: Losses | None,
    comms: Sequence[Comm],
    unquantized_s: float,
) -> list[str]:
    files = options.measured or [path for path in (OWN, KEPT) if path.exists()]
    rows = [row for path in files for row in read_rows(path)]
    notes = [f"Error of these predictions: {error_text(where, rows)}."]
    single = [call for path in (calls.OWN, calls.KEPT) if path.exists() for call in calls.read_calls(path)]
    if (said := calls.call_error_text(where, single)) is not None:
        notes.append(f"Beside {said}.")
    if (said := calls.break_even_text(where, single, comms, prefill.world_size)) is not None:
        notes.append(f"Measured {said}. Where a predicted size differs, this one counts.")
    fast = [name for name in ("fused", "nccl", "codec") if getattr(where.parameters, name).value > 1]
    if fast:
        notes.append(
            f"{' and '.join(fast)} above 1: more than a data sheet's rate, so a fit did not tell a call's parts "
            "apart; trust it near the sizes and W that were measured, and no break-even below them."
        )
    notes.append(
        "Predicted, not measured: a cost model without overlap, for a fused kernel; see the parameters' sources."
    )
    shape = prefill.shape
    parts = {"heads": shape.heads, "key/value heads": shape.kv_heads, "MLP columns": shape.intermediate}
    for what, count in parts.items():
        if count % prefill.world_size:
            notes.append(
                f"tp={prefill.world_size} does not divide the {count} {what}: the busiest rank, with "
                f"{prefill.share(count)} of them, is predicted."
            )
    layer_s = unquantized_s / shape.layers
    if layer_s < LAUNCHES_S:
        notes.append(
            f"A layer is predicted to take {1e3 * layer_s:.2f} ms: launching its kernels, which the model leaves out, "
            "may take as long unless a graph holds them."
        )
    needed, there = weight_bytes(prefill) / 1e9, where.gpu.memory_gb
    if there is not None and needed > there:
        notes.append(f"The weights of one rank take {needed:.0f} GB, more than the {there:g} GB of {where.gpu.name}.")
    if options.runs and losses is None:
        folders = ", ".join(map(str, options.runs))
        notes.append(
            f"No run of {Path(options.model).name} with {options.weights} weights at tp={options.tp} is in {folders}: "
            "no loss is known."
        )
    elif losses is not None:
        notes.append(f"Losses: {losses.title}.")
    return notes


def _write_csv(path: Path, options: PredictOptions, found: Sequence[Choice]) -> Path:
    """All numbers of the page, unrounded."""
    asked = ("model", "gpu", "link", "tp", "batch", "tokens", "weights")
    settings = {name: getattr(options, name) for name in asked} | {"link": machine(options.gpu, options.link).link.name}
    times = ("gemm_s", "attention_s", "rest_s", "ends_s", "comm_s")
    calls = ("latency_s", "link_s", "codec_s", "wire_bytes", "bits")
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            head = [*asked, "comm", "ttft_s", "speed_up", "pays_from_kib", *times, *(f"call_{name}" for name in calls)]
            writer.writerow([*head, "ln_ppl_ratio", "ln_ppl_ratio_stderr", "accuracy_delta", "accuracy_delta_stderr"])
            for choice in found:
                row = [settings[name] for name in asked] + [choice.comm.name, choice.time.total_s]
                row += [choice.speed_up, choice.pays_from_kib]
                row += [getattr(choice.time, name) for name in times] + [
                    getattr(choice.time.call, name) for name in calls
                ]
                perplexity = choice.loss.perplexity if choice.loss else None
                accuracy = choice.loss.accuracy if choice.loss else None
                row += [perplexity.ln_ratio, perplexity.ln_ratio_stderr] if perplexity else [None, None]
                row += [accuracy.delta, accuracy.delta_stderr] if accuracy else [None, None]
                writer.writerow(row)
    except OSError as error:
        raise os_error(error, path) from None
    return path


def check_text(values: dict[str, float]) -> str:
    """Published numbers beside predictions, a table per source with why they differ, and the median deviation."""
    checked = check(published(values))
    parts = []
    for name, group in preset(GROUP, "published").items():
        members = [each for each in checked if each.point.source == group["source"]]
        parts += [f"{name}: {group['source']}", screen_table(_check_table(members)), _summary(members), *group["why"]]
    parts.append("The model is not tuned to these numbers; `fc-eval calibrate` measures a machine's own rates.")
    return "\n\n".join(parts)


def _summary(checked: Sequence[Checked]) -> str:
    deviation = statistics.median(abs(each.deviation) for each in checked)
    said = f"median deviation {100 * deviation:.0f} % over {len(checked)} numbers"
    saved = [each.saved for each in checked if each.saved is not None]
    if saved:
        share = statistics.median(abs(ours / theirs - 1) for theirs, ours in saved)
        said += f"; of the time saved, of which a ratio near 1 says little, {100 * share:.0f} %"
    return said


def _check_table(checked: Sequence[Checked]) -> Table:
    columns = [Column(title, words=True) for title in ("machine", "setting", "where", "comm")]
    columns += [Column(title) for title in ("published", "predicted", "range", "deviation")]
    columns += [Column(title, "time saved, %") for title in ("published", "predicted")]
    rows = []
    for each in checked:
        point, unit = each.point, "" if each.point.quantity == "comm_share" else "x"
        span = "" if each.low == each.high else f"{each.low:.2f} to {each.high:.2f}"
        cells = [f"{point.tp} x {point.machine.label}", point.setting, point.where, point.comm]
        cells += [f"{point.value:.2f}{unit}", f"{each.predicted:.2f}{unit}", span, f"{100 * each.deviation:+.0f} %"]
        saved = each.saved
        cells += ["", ""] if saved is None else [f"{100 * share:.1f}" for share in saved]
        rows.append(tuple(map(Cell, cells)))
    return Table(tuple(columns), tuple(rows))
