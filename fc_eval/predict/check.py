"""Published measurements beside the model's predictions, with the deviation: `fc-eval predict --check`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fc_eval.collective.comm import parse_comm
from fc_eval.errors import unknown
from fc_eval.predict.break_even import UNQUANTIZED
from fc_eval.predict.machine import GROUP, Machine, machine
from fc_eval.predict.model import all_reduce, predict
from fc_eval.predict.shapes import named_shape
from fc_eval.predict.work import WIDTH, Prefill
from fc_eval.presets import preset

# Columns of the message of a single all-reduce; time hardly depends on it.
HIDDEN = 4096


@dataclass(frozen=True)
class Point:
    """One published number: what it is, for which machine and comm, and where it stands.

    `batch` holds every batch size that the source may mean; `mib` is the message of a single all-reduce.
    """

    source: str
    where: str
    quantity: str
    machine: Machine
    tp: int
    comm: str
    value: float
    model: str | None = None
    weights: str = "bf16"
    batch: tuple[int, ...] = ()
    tokens: int = 0
    mib: int = 0

    @property
    def setting(self) -> str:
        """'llama3_8b w8a8, batch 64' or '1024 MiB'."""
        if self.quantity == "all_reduce_speed_up":
            return f"all-reduce of {self.mib} MiB"
        sizes = f"{self.batch[0]}" if len(self.batch) == 1 else f"{self.batch[0]} to {self.batch[-1]}"
        what = "share of communication, " if self.quantity == "comm_share" else ""
        return f"{what}{self.model} {self.weights}, batch {sizes}"


@dataclass(frozen=True)
class Checked:
    """A published number and what the model says: the mean over the batch sizes that may be meant, and its ends."""

    point: Point
    predicted: float
    low: float
    high: float

    @property
    def deviation(self) -> float:
        """predicted / published - 1."""
        return self.predicted / self.point.value - 1

    @property
    def saved(self) -> tuple[float, float] | None:
        """The share of the time that is saved, published and predicted; None for what is no speed-up."""
        if self.point.quantity == "comm_share":
            return None
        return 1 - 1 / self.point.value, 1 - 1 / self.predicted


def published(values: Mapping[str, float] | None = None) -> list[Point]:
    """The points of `conf/hardware/published.yaml`; `values` replace parameters of all machines."""
    found = []
    for group in preset(GROUP, "published").values():
        for said in group["points"]:
            rest: dict[str, Any] = {key: value for key, value in said.items() if key not in ("gpu", "link", "batch")}
            where = machine(said["gpu"], said["link"], values)
            found.append(Point(group["source"], machine=where, batch=tuple(said.get("batch", ())), **rest))
    return found


def check(points: Sequence[Point]) -> list[Checked]:
    """Predicts every point."""
    checked = []
    for point in points:
        values = _predictions(point)
        checked.append(Checked(point, statistics.fmean(values), min(values), max(values)))
    return checked


def _predictions(point: Point) -> list[float]:
    comm = parse_comm(point.comm)
    if point.quantity == "all_reduce_speed_up":
        rows = point.mib * 2**20 // (HIDDEN * WIDTH)
        theirs, ours = (all_reduce(c, point.tp, rows, HIDDEN, point.machine).total_s for c in (UNQUANTIZED, comm))
        return [theirs / ours]
    if point.quantity not in ("speed_up", "comm_share"):
        raise unknown("quantity", point.quantity, ["speed_up", "comm_share", "all_reduce_speed_up"])
    found = []
    for batch in point.batch:
        prefill = Prefill(named_shape(str(point.model)), point.tp, batch, point.tokens, point.weights)
        base = predict(prefill, UNQUANTIZED, point.machine)
        if point.quantity == "comm_share":
            found.append(base.comm_share)
        else:
            found.append(base.total_s / predict(prefill, comm, point.machine).total_s)
    return found
