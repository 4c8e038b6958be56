"""Measured all-reduces: rows of the CSV file of `fc-eval bench allreduce`, and how far a predicted call is off.

Of its rows those of NCCL and of the fused kernel with its own number of blocks count, in bf16; the others are other
implementations or dtypes, or that kernel with a number of blocks that nobody would run.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.predict.break_even import UNQUANTIZED
from fc_eval.predict.machine import Gpu, Machine
from fc_eval.predict.model import AllReduce, all_reduce
from fc_eval.predict.rows import is_same_machine, log_ratio
from fc_eval.predict.work import LARGEST, MOST_RANKS, WIDTH
from fc_eval.results.measured_csv import MEND, expect_columns, read_measured

NEEDED = ("device", "link", "world_size", "implementation", "algorithm", "format", "size_bytes", "blocks", "time_us")
# Columns of the messages of `bench allreduce`, in bf16.
HIDDEN = 4096
# Where `fc-eval bench allreduce` writes, and what this project measured.
OWN, KEPT = Path("bench/allreduce.csv"), Path("reports/fused/allreduce.csv")


@dataclass(frozen=True)
class Call:
    """One measured all-reduce of [rows, 4096] values in bf16."""

    device: str
    link: str
    world_size: int
    comm: Comm
    rows: int
    time_us: float

    shows = frozenset({"codec"})

    @property
    def is_quantized(self) -> bool:
        """Whether anything was encoded."""
        return self.comm.is_quantized

    def is_of(self, gpu: Gpu, link: str) -> bool:
        """Whether this was measured on such a machine."""
        return is_same_machine(self.device, self.link, gpu, link)

    def call(self, machine: Machine) -> AllReduce:
        """The same all-reduce, predicted."""
        return all_reduce(self.comm, self.world_size, self.rows, HIDDEN, machine)

    def residuals(self, machine: Machine) -> list[float]:
        """ln(predicted / measured)."""
        return [log_ratio(1e6 * self.call(machine).total_s, self.time_us)]

    def error(self, machine: Machine) -> float:
        """|predicted / measured - 1|."""
        return abs(1e6 * self.call(machine).total_s / self.time_us - 1)


def read_calls(path: Path) -> list[Call]:
    """The rows of a file that predictions are about.

    Raises:
        FcEvalError: no such file, other columns, or a row with a value that is not possible.
    """
    lines = read_measured(path, expect_columns(path, NEEDED, "bench allreduce"))
    return [_call(path, line, said) for line, said in lines if _counts(said)]


def _counts(said: Mapping[str, str]) -> bool:
    """Whether predictions are about such a row; files of earlier versions say no dtype: bf16 is assumed."""
    kind = (said["implementation"], said["blocks"])
    return kind in {("nccl", ""), ("fused", "0")} and said.get("dtype", "") in ("", "bf16")


def call_error_text(machine: Machine, calls: Sequence[Call]) -> str | None:
    """How far predicted all-reduces are off on this machine, in words; None where none was measured."""
    own = [call for call in calls if call.is_of(machine.gpu, machine.link.name)]
    if not own:
        return None
    kinds = {"NCCL's": [c for c in own if not c.is_quantized], "quantized": [c for c in own if c.is_quantized]}
    parts = [
        f"{100 * statistics.median(call.error(machine) for call in found):.0f} % of {len(found)} {kind}"
        for kind, found in kinds.items()
        if found
    ]
    sizes = ", ".join(str(size) for size in sorted({call.world_size for call in own}))
    return f"measured all-reduces at W = {sizes}: median error {' and '.join(parts)} calls"


def break_even_text(machine: Machine, calls: Sequence[Call], comms: Sequence[Comm], world_size: int) -> str | None:
    """From which measured size on each comm stays faster than NCCL; None where none was measured."""
    own = [call for call in calls if call.is_of(machine.gpu, machine.link.name) and call.world_size == world_size]
    theirs = {call.rows: call.time_us for call in own if not call.is_quantized}
    parts = []
    for comm in comms:
        ours = {call.rows: call.time_us for call in own if call.comm == comm and call.rows in theirs}
        if not ours:
            continue
        start = None
        for rows in sorted(ours, reverse=True):
            if ours[rows] >= theirs[rows]:
                break
            start = rows
        kib = "never" if start is None else f"from {_kib(start)} KiB" + (", the smallest" if start == min(ours) else "")
        parts.append(f"{comm.label} {kib}")
    if not parts:
        return None
    sizes = f"{_kib(min(theirs))} to {_kib(max(theirs))} KiB"
    return f"ahead of NCCL at W = {world_size}, {sizes}: {'; '.join(parts)}"


def _kib(rows: int) -> str:
    return f"{rows * HIDDEN * WIDTH // 1024:,}"


def _call(path: Path, line: int, said: dict[str, str]) -> Call:
    try:
        nccl = said["implementation"] == "nccl"
        comm = UNQUANTIZED if nccl else parse_comm(f"{said['algorithm']}:{said['format']}")
        rows = int(said["size_bytes"]) // (HIDDEN * WIDTH)
        found = Call(said["device"], said["link"], int(said["world_size"]), comm, rows, float(said["time_us"]))
    except (ValueError, TypeError) as error:  # a FcEvalError is a ValueError
        raise FcEvalError(f"{path}, line {line}: {error}: {MEND}") from None
    if not (1 <= found.rows <= LARGEST // HIDDEN and 0 < found.time_us < math.inf):
        raise FcEvalError(f"{path}, line {line}: a size or time is not above 0, or too large: {MEND}")
    if not 2 <= found.world_size <= MOST_RANKS:
        raise FcEvalError(
            f"{path}, line {line}: world_size={found.world_size} is not possible, expected 2 to {MOST_RANKS}: {MEND}"
        )
    return found
