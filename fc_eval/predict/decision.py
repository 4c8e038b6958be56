"""Predicted times and measured losses of the same comms: rows, tables and the Pareto front."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fc_eval.collective.comm import BASELINE, Comm
from fc_eval.predict.break_even import UNQUANTIZED, break_even_kib
from fc_eval.predict.losses import Loss, Losses
from fc_eval.predict.machine import NAMES, Machine
from fc_eval.predict.model import Ttft, predict
from fc_eval.predict.work import WIDTH, Prefill
from fc_eval.report.pareto import front
from fc_eval.report.tables import Cell, Column, Table, words
from fc_eval.results.delta import Delta
from fc_eval.results.text import MISSING, PLUS_MINUS, delta_text, number, value_text

NOT_MEASURED = "not measured"
UNQUANTIZED_LABEL = "unquantized (NCCL ring)"


@dataclass(frozen=True)
class Choice:
    """One comm: its predicted time, from which message size on it pays (None: never), and its measured loss."""

    comm: Comm
    label: str
    time: Ttft
    speed_up: float
    pays_from_kib: float | None
    loss: Loss | None

    @property
    def is_unquantized(self) -> bool:
        """Whether this is what the others are compared with."""
        return self.comm == UNQUANTIZED


def choices(prefill: Prefill, comms: Sequence[Comm], machine: Machine, losses: Losses | None) -> list[Choice]:
    """The unquantized all-reduce, then each comm.

    Raises:
        FcEvalError: as `predict`.
    """
    base = predict(prefill, UNQUANTIZED, machine)
    hidden, world_size = prefill.shape.hidden, prefill.world_size
    known = losses.by_comm if losses is not None else {}
    exact = known.get(UNQUANTIZED) or known.get(BASELINE)  # the framework's own sum, else the ordered one
    found = [Choice(UNQUANTIZED, UNQUANTIZED_LABEL, base, 1.0, None, exact)]
    for comm in (comm for comm in dict.fromkeys(comms) if comm.is_quantized):
        time = predict(prefill, comm, machine)
        pays = break_even_kib(comm, world_size, hidden, machine)
        found.append(Choice(comm, comm.label, time, base.total_s / time.total_s, pays, known.get(comm)))
    return found


def loss_of(choice: Choice) -> float:
    """What a front is drawn over: nothing for the unquantized all-reduce, NaN where it was not measured."""
    if choice.is_unquantized:
        return 0.0
    return math.nan if choice.loss is None else choice.loss.size


def front_of(found: Sequence[Choice]) -> set[int]:
    """Places of the choices that no other one beats in both time and loss."""
    points = [(choice.time.total_s, loss_of(choice)) for choice in found]
    places = [i for i, (_, loss) in enumerate(points) if not math.isnan(loss)]
    return {places[i] for i in front([points[place] for place in places])}


def choices_table(found: Sequence[Choice], hidden: int, losses: Losses | None) -> Table:
    """A row per comm: bits, bytes, times, speed-up, break-even, and the measured losses where runs were given."""
    columns = [Column("comm", words=True), Column("bits"), Column("sent per call, MiB")]
    columns += [Column(title, "predicted") for title in ("all-reduce, ms", "TTFT, ms", "speed-up", "pays from, KiB")]
    kinds = _kinds(losses)
    columns += [Column(title, over) for _, over in kinds for title in ("value", f"Δ {PLUS_MINUS} error")]
    on_front, row_kib = front_of(found), hidden * WIDTH / 1024
    if losses is not None:
        columns.append(Column("on the front", words=True))
    rows = []
    for i, choice in enumerate(found):
        call = choice.time.call
        cells = [Cell(choice.label), Cell(number(call.bits, 2), call.bits), _number(call.wire_bytes / 2**20, 2)]
        cells += [_number(1e3 * call.total_s, 3), _number(1e3 * choice.time.total_s, 1)]
        cells += [Cell(f"{choice.speed_up:.2f}x", choice.speed_up), _pays(choice, row_kib)]
        for kind, _ in kinds:
            cells += _loss_cells(choice, getattr(choice.loss, kind) if choice.loss is not None else None)
        if losses is not None:
            cells.append(Cell("yes" if i in on_front else ""))
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows), pinned=1)


def _kinds(losses: Losses | None) -> list[tuple[str, str]]:
    if losses is None:
        return []
    kinds = [("perplexity", losses.perplexity), ("accuracy", losses.accuracy)]
    return [(kind, f"{label} {kind}" if kind == "perplexity" else label) for kind, label in kinds if label]


def _loss_cells(choice: Choice, d: Delta | None) -> tuple[Cell, Cell]:
    if d is None:
        return Cell(NOT_MEASURED), Cell(MISSING)
    return Cell(value_text(d.value, d.metric), d.value), Cell(delta_text(d), d.delta)


def _number(value: float, places: int) -> Cell:
    return Cell(number(value, places), value)


def _pays(choice: Choice, smallest_kib: float) -> Cell:
    if choice.is_unquantized:
        return Cell("")
    if choice.pays_from_kib is None:
        return Cell("never", math.inf)
    if choice.pays_from_kib <= smallest_kib:
        return Cell("any size", choice.pays_from_kib)
    return _number(choice.pays_from_kib, 0)


def parts_table(found: Sequence[Choice]) -> Table:
    """Where the time goes: milliseconds of each part, the all-reduces split into latency, link and codec."""
    titles = ["products", "attention", "norms, rope, activation", "embedding, head"]
    columns = [Column("comm", words=True), *(Column(title) for title in titles)]
    columns += [Column(title, "all-reduces") for title in ("latency", "link", "codec", "share of TTFT")]
    rows = []
    for choice in found:
        time, call = choice.time, choice.time.call
        parts = [time.gemm_s, time.attention_s, time.rest_s, time.ends_s]
        calls = time.comm_s / call.total_s
        parts += [calls * part for part in (call.latency_s, call.link_s, call.codec_s)]
        cells = [Cell(choice.label), *(_number(1e3 * part, 1) for part in parts)]
        rows.append((*cells, Cell(f"{100 * time.comm_share:.0f} %", time.comm_share)))
    return Table(tuple(columns), tuple(rows), pinned=1)


def parameters_table(machine: Machine) -> Table:
    """Every parameter of the model for this machine, its value and where that comes from."""
    rows = [[name, f"{p.value:g}", p.source] for name in NAMES if (p := getattr(machine.parameters, name))]
    gpu, link = machine.gpu, machine.link
    int8 = "" if gpu.int8_tops is None else f", {gpu.int8_tops:g} INT8"
    rates = f"{gpu.bf16_tflops:g} TFLOPS bf16{int8}, memory {gpu.memory_gb_per_s:g} GB/s"
    rows += [[gpu.name, rates, gpu.source], [link.name, f"{link.gb_per_s:g} GB/s each way", link.source]]
    return words(["parameter", "value", "source"], rows)
