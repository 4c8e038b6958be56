"""Measured all-reduces: rows of `fc-eval bench allreduce` by device, link, W and dtype, as lines over the size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.results.measured_csv import MEND, read_measured

COLUMNS = (
    *("device", "link", "world_size", "implementation", "algorithm", "format", "group_size", "size_bytes", "blocks"),
    *("time_us", "algbw_gbps", "busbw_gbps", "wire_bytes", "link_fraction", "ratio_to_nccl", "sqnr_db"),
    *("bytes_checked", "ranks_equal", "dtype"),
)
ADDED = ("dtype",)  # what files of earlier versions lack
KEY = (*COLUMNS[:9], "dtype")

FUSED, NCCL, TWO_SHOT = "fused", "nccl", "symm_mem_two_shot"
LABELS = {NCCL: "NCCL", TWO_SHOT: "PyTorch symmetric memory, two-shot"}
# What writes into the memory of other GPUs even where the run's own bytes go through memory of the host.
PEER_ACCESS = frozenset({TWO_SHOT})
STAGED = "staged"
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class AllReduceRow:
    """One measurement.

    Attributes:
        comm: None for what does not quantize.
        blocks: thread blocks per rank; 0 is the kernel's default, None what is not the fused kernel.
        wire_bytes: what the busiest rank sends.
        dtype: of the values; '' where it was not noted.
        link_fraction: the share of the link that these are; None where ranks share a GPU.
        ratio_to_nccl: how many times as fast as NCCL in the same run; None where NCCL was not measured.
        sqnr_db: signal over quantization noise; None for what does not quantize.
    """

    device: str
    link: str
    world_size: int
    implementation: str
    comm: Comm | None
    size_bytes: int
    blocks: int | None
    time_us: float
    wire_bytes: int
    dtype: str
    link_fraction: float | None
    ratio_to_nccl: float | None
    sqnr_db: float | None

    @property
    def label(self) -> str:
        """'NCCL', 'two-step INT4 g128': for tables."""
        if self.comm is None:
            return LABELS.get(self.implementation, self.implementation)
        algorithm = "two-step " if self.comm.algorithm == "two_step" else ""  # a comm's own label leaves out this one
        other = "" if self.implementation == FUSED else f"{self.implementation}: "
        return f"{other}{algorithm}{self.comm.label}"

    @property
    def takes_the_link(self) -> bool:
        """Whether its bytes go over the link of the run."""
        return not (self.implementation in PEER_ACCESS and self.link.startswith(STAGED))

    @property
    def bytes_share(self) -> float:
        """Its bytes over those of an unquantized all-reduce."""
        return self.wire_bytes * self.world_size / (2 * self.size_bytes * (self.world_size - 1))


@dataclass(frozen=True)
class Line:
    """One implementation and comm over the message size."""

    label: str
    by_size: dict[int, AllReduceRow]

    @property
    def first(self) -> AllReduceRow:
        """The row that stands for what all of them share."""
        return next(iter(self.by_size.values()))

    def ratios(self) -> dict[int, float]:
        """How many times as fast as NCCL in the same run, by size."""
        found = {size: row.ratio_to_nccl for size, row in self.by_size.items()}
        return {size: ratio for size, ratio in found.items() if ratio is not None}


@dataclass(frozen=True)
class Place:
    """All rows of one device, link, W and dtype ('' where that was not noted), in the order of the file."""

    device: str
    link: str
    world_size: int
    dtype: str
    rows: tuple[AllReduceRow, ...]

    @property
    def title(self) -> str:
        """'NVIDIA H200, peer, W = 2, bf16'."""
        return ", ".join([self.device, self.link, f"W = {self.world_size}", *filter(None, [self.dtype])])

    @property
    def sizes(self) -> list[int]:
        """Message sizes in bytes, rising."""
        return sorted({row.size_bytes for row in self.rows})

    def lines(self) -> list[Line]:
        """A line per comm with the default number of blocks, or, where that was not measured, per number of blocks."""
        with_default = {row.label for row in self.rows if not row.blocks}
        found: dict[str, dict[int, AllReduceRow]] = {}
        for row in self.rows:
            if row.blocks and row.label in with_default:
                continue
            found.setdefault(f"{row.label}, {row.blocks} blocks" if row.blocks else row.label, {})[row.size_bytes] = row
        return [Line(label, dict(sorted(by_size.items()))) for label, by_size in found.items()]


def read_places(path: Path) -> list[Place]:
    """The rows of a file by device, link, W and dtype, in the order in which these first appear.

    Raises:
        FcEvalError: no such file, other columns, no row, or a row with a value that is not possible.
    """

    def check(names: list[str]) -> None:
        apart = {"unknown": set(names) - set(COLUMNS), "missing": set(COLUMNS) - set(names) - set(ADDED)}
        if any(apart.values()):
            what = "; ".join(f"{word} {', '.join(sorted(found))}" for word, found in apart.items() if found)
            raise FcEvalError(
                f"{path} does not have the columns of `fc-eval bench allreduce` ({what}): give a file that it wrote"
            )

    rows = [_row(path, line, said) for line, said in read_measured(path, check)]
    if not rows:
        raise FcEvalError(f"{path} has no row: measure some with `fc-eval bench allreduce out={path}`")
    places: dict[tuple[str, str, int, str], list[AllReduceRow]] = {}
    for row in rows:
        places.setdefault((row.device, row.link, row.world_size, row.dtype), []).append(row)
    return [Place(*key, tuple(members)) for key, members in places.items()]


def record_name(stem: str, link: str, world_size: int) -> str:
    """Name of the text file with the printed table of a run, beside the CSV file."""
    return f"{stem}_{link.replace(', ', '_').replace(' ', '_')}_w{world_size}.txt"


def best_ratios(lines: Sequence[Line]) -> dict[int, float]:
    """By size, how many times as fast as NCCL the best of what does not quantize is; NCCL itself is one of them."""
    found: dict[int, float] = {}
    for line in lines:
        if line.first.comm is None and line.first.takes_the_link:
            for size, ratio in line.ratios().items():
                found[size] = max(ratio, found.get(size, 0.0))
    return found


def ahead_from(ours: dict[int, float], theirs: dict[int, float]) -> int | None:
    """The smallest size that both have from which on ours is larger at every one; None where it never stays so."""
    start = None
    for size in sorted(ours.keys() & theirs.keys(), reverse=True):
        if ours[size] <= theirs[size]:
            break
        start = size
    return start


def size_text(size_bytes: int) -> str:
    """'64 KiB', '1.5 MiB', '1 GiB'."""
    name, unit = next(((name, unit) for name, unit in UNITS if size_bytes >= unit), ("B", 1))
    return f"{size_bytes / unit:g} {name}"


def _row(path: Path, line: int, said: dict[str, str]) -> AllReduceRow:
    try:
        world_size, size_bytes, wire_bytes = (int(said[key]) for key in ("world_size", "size_bytes", "wire_bytes"))
        comm = parse_comm(f"{said['algorithm']}:{said['format']}") if said["format"] else None
        blocks = int(said["blocks"]) if said["blocks"] else None
        known = {key: float(said[key]) for key in ("link_fraction", "ratio_to_nccl", "sqnr_db") if said[key]}
        time_us = float(said["time_us"])
    except (ValueError, TypeError) as error:  # a FcEvalError is a ValueError
        raise FcEvalError(f"{path}, line {line}: {error}: {MEND}") from None
    if not (world_size > 1 and min(size_bytes, wire_bytes) > 0 and 0 < time_us < math.inf):
        raise FcEvalError(f"{path}, line {line}: W is below 2, or a size or time is not above 0: {MEND}")
    if max(size_bytes, wire_bytes) >= 2**63 or (blocks or 0) < 0:
        raise FcEvalError(f"{path}, line {line}: a size is 2^63 bytes or more, or blocks is below 0: {MEND}")
    for name in ("link_fraction", "ratio_to_nccl"):
        if not 0 <= (value := known.get(name, 0.0)) < math.inf:
            raise FcEvalError(f"{path}, line {line}: {name}={value} is not possible: {MEND}")
    return AllReduceRow(
        said["device"],
        said["link"],
        world_size,
        said["implementation"],
        comm,
        size_bytes,
        blocks,
        time_us,
        wire_bytes,
        said.get("dtype", ""),
        *(known.get(key) for key in ("link_fraction", "ratio_to_nccl", "sqnr_db")),
    )
