"""Measured times to first token: rows of a CSV file such as `reports/bench/ttft.csv`, and how far a prediction is off.

    device,link,world_size,model,weights,batch,input_tokens,comm,algorithm,ttft_ms,comm_ms,gemm_ms,attention_ms,other_ms,
    ratio_to_nccl

`model` is a preset's name, with the number of layers where not all of them ran: `llama3_8b[4 layers]`. Times of parts
may be empty. `comm` is a comm's name, `plain` for NCCL.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.predict.machine import Gpu, Machine
from fc_eval.predict.model import AllReduce, Ttft, predict
from fc_eval.predict.shapes import named_shape
from fc_eval.predict.work import Prefill
from fc_eval.results.measured_csv import MEND, expect_columns, read_measured

COLUMNS = (
    *("device", "link", "world_size", "model", "weights", "batch", "input_tokens", "comm", "algorithm", "ttft_ms"),
    *("comm_ms", "gemm_ms", "attention_ms", "other_ms", "ratio_to_nccl"),
)
KEY = COLUMNS[:9]
# Columns of parts, and what of a prediction each one is beside.
PARTS = {"gemm_ms": "gemm_s", "attention_ms": "attention_s", "other_ms": "other_s", "comm_ms": "comm_s"}
# What a bench writes that knows no more of a link than that GPUs reach each other.
PEER_LINK = "peer"
# How the algorithm of a row ends that did not run as one kernel, which is what predictions are about.
UNFUSED = " (unfused)"
# Of a row of another framework's all-reduce, which no prediction is about.
TWO_SHOT = "two_shot (symmetric memory)"
# Where `fc-eval bench ttft` writes, and what this project measured.
OWN, KEPT = Path("bench/ttft.csv"), Path("reports/bench/ttft.csv")


@dataclass(frozen=True)
class Row:
    """One measurement: where, what, and milliseconds; `parts` by column, those that were measured."""

    device: str
    link: str
    prefill: Prefill
    comm: Comm
    algorithm: str
    ttft_ms: float
    parts: dict[str, float]

    def is_of(self, gpu: Gpu, link: str) -> bool:
        """Whether this was measured on such a machine, and is what predictions are about."""
        return is_same_machine(self.device, self.link, gpu, link) and not self.algorithm.endswith((UNFUSED, TWO_SHOT))

    @property
    def shows(self) -> frozenset[str]:
        """Parameters that the times of this row show, apart from those of its all-reduces."""
        by_part = {"attention_ms": "attention", "other_ms": "memory"}
        product = "gemm_int8" if self.prefill.weights == "w8a8" else "gemm_bf16"
        return frozenset({product, *(name for part, name in by_part.items() if part in self.parts)})

    @property
    def is_quantized(self) -> bool:
        """Whether its all-reduces encode anything."""
        return self.comm.at(self.prefill.rows).is_quantized

    def call(self, machine: Machine) -> AllReduce:
        """One of its all-reduces, predicted."""
        return predicted(self, machine).call

    def residuals(self, machine: Machine) -> list[float]:
        """ln(predicted / measured) of its parts, and of the whole where not all of these were measured."""
        times = predicted(self, machine)
        whole = () if len(self.parts) == len(PARTS) else (log_ratio(1e3 * times.total_s, self.ttft_ms),)
        parts = [log_ratio(1e3 * getattr(times, PARTS[name]), value) for name, value in self.parts.items() if value > 0]
        return [*whole, *parts]

    def error(self, machine: Machine) -> float:
        """|predicted / measured - 1| of the time to first token."""
        return abs(1e3 * predicted(self, machine).total_s / self.ttft_ms - 1)


def log_ratio(predicted: float, measured: float) -> float:
    """ln(predicted / measured) of two positive times, also where their ratio itself is none that a float holds."""
    return math.log(predicted) - math.log(measured)


def is_same_machine(device: str, device_link: str, gpu: Gpu, link: str) -> bool:
    """Whether something measured on `device`, as torch names it, over `device_link` is about this GPU and link."""
    named = {name.casefold() for name in (gpu.device, gpu.name) if name}
    own = [f"{kind}{getattr(gpu, kind)}" for kind in ("nvlink", "pcie") if getattr(gpu, kind) is not None]
    links = {link, PEER_LINK} if link in own[:1] or gpu.link is not None else {link}
    return device.casefold() in named and device_link in links


def read_rows(path: Path) -> list[Row]:
    """All rows of a file.

    Raises:
        FcEvalError: no such file, other columns, or a row with a value that is not possible.
    """
    said = read_measured(path, expect_columns(path, COLUMNS, "bench ttft"))
    return [_row(path, line, values) for line, values in said]


def relative_errors(rows: Sequence[Row], machine: Machine) -> list[float]:
    """|predicted / measured - 1| of the time to first token of each row."""
    return [row.error(machine) for row in rows]


def predicted(row: Row, machine: Machine) -> Ttft:
    """What the model says of a row."""
    return predict(row.prefill, row.comm, machine)


def error_text(machine: Machine, rows: Sequence[Row]) -> str:
    """How far predictions for this machine are off where it was measured, in words."""
    fitted = machine.gpu.fitted
    if fitted is not None:
        error = 100 * fitted.median_error
        return (
            f"fitted to {fitted.points} measured {fitted.what}; median error {error:.1f} % on {fitted.held_out} others"
        )
    own = [row for row in rows if row.is_of(machine.gpu, machine.link.name)]
    if not own:
        return "no measured time to first token for this machine"
    errors = [100 * error for error in relative_errors(own, machine)]
    middle, largest = statistics.median(errors), max(errors)
    return f"median error {middle:.1f} % (largest {largest:.1f} %) on {len(own)} measured points"


def _row(path: Path, line: int, said: dict[str, str]) -> Row:
    try:
        found = re.fullmatch(r"(.+?)(?:\[(\d+) layers\])?", said["model"])
        if found is None:
            raise FcEvalError("no model")
        shape = named_shape(found[1])
        if found[2]:
            shape = replace(shape, layers=int(found[2]))
        world_size, batch, tokens = (int(said[key]) for key in ("world_size", "batch", "input_tokens"))
        prefill = Prefill(shape, world_size, batch, tokens, said["weights"])
        parts = {key: float(said[key]) for key in PARTS if said[key]}
        comm, ttft_ms = parse_comm(said["comm"]), float(said["ttft_ms"])
        row = Row(said["device"], said["link"], prefill, comm, said["algorithm"], ttft_ms, parts)
    except (ValueError, TypeError) as error:  # a FcEvalError is a ValueError
        raise FcEvalError(f"{path}, line {line}: {error}: {MEND}") from None
    if not (0 < row.ttft_ms < math.inf and all(0 <= value < math.inf for value in parts.values())):
        raise FcEvalError(f"{path}, line {line}: a time is not above 0, or not finite: {MEND}")
    return row
