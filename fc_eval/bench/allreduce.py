"""How fast the fused all-reduce is, beside NCCL and PyTorch's symmetric-memory two-shot in the same processes.

    fc-eval bench allreduce [ranks=2] [virtual=true] [transport=staged] [formats=int4,int4_int8] [kib=1024] [blocks=0]
    fc-eval bench allreduce plot=FILE.csv     draws the page of such a file again; measures nothing, needs no GPU

One process per rank, each with a GPU (several share one where there are too few; NCCL then has no rows), or with
virtual=true all ranks in one launch on one GPU, which shows what the kernel's instructions cost, not a link.

Bytes first: for every comm, results of awkward values are compared with the emulator's bit for bit on every rank before
anything is timed, and so are those of the timed values. Then CUDA graphs of 16 calls or more over buffers that together
exceed the L2 cache: median of 30 replays, the maximum over ranks. `algbw_gbps` is the message (T * H values) over the
time, `busbw_gbps` that times 2 (W - 1) / W, `wire_bytes` what the busiest rank sends to others; `link_fraction` is
wire_bytes over the time and the bandwidth of a plain copy of the same run, from GPU to GPU or, where the transport is
staged, to the host (empty where ranks share a GPU). `sqnr_db` is the signal over the quantization noise, against the
sum of the partial sums in fp64.

Writes the CSV file (rows of other devices, links and comms stay), and beside it the printed table with hardware,
versions and the command, and a page of all rows with plots: times beside NCCL, from which message size on each comm is
ahead, shares of the link.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fc_eval.bench.allreduce_page import write_page
from fc_eval.bench.allreduce_rows import ADDED, COLUMNS, FUSED, KEY, NCCL, TWO_SHOT, record_name
from fc_eval.bench.bytes import SMALL_SHAPES, awkward_values
from fc_eval.bench.circle import Circle, in_circle
from fc_eval.bench.machine import device_name, provenance
from fc_eval.bench.table import Row, merge_csv, rows_to_keep, text_table
from fc_eval.bench.timing import sets_of_buffers
from fc_eval.codec.base import DTYPE_NAMES, DTYPES
from fc_eval.codec.format_ints import format_ints
from fc_eval.codec.select import get_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.collective.communicator import TRANSPORTS
from fc_eval.collective.traffic import traffic_of
from fc_eval.errors import FcEvalError, unknown

PRINTED = COLUMNS[3:]
HIDDEN = 4096
COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class AllReduceBenchOptions:
    """What `fc-eval bench allreduce` is asked for."""

    ranks: int = field(default=2, metadata={"help": "W, 2 to 8"})
    virtual: str = field(default="false", metadata={"help": "true: all ranks on one GPU in one launch"})
    transport: str = field(default="auto", metadata={"help": "auto, peer or staged (through memory of the host)"})
    formats: tuple[str, ...] = field(
        default=("int4", "int4-g32", "int8", "int4_int8", "one_step:int4", "one_step:int8"), metadata={"help": "comms"}
    )
    kib: tuple[int, ...] = field(
        default=(64, 256, 1024, 4096, 16384, 65536, 262144, 1048576), metadata={"help": "message sizes in KiB"}
    )
    blocks: tuple[int, ...] = field(default=(0,), metadata={"help": "thread blocks per rank; 0: the default"})
    dtype: str = field(default="bf16", metadata={"help": "bf16, fp16 or fp32"})
    out: Path = field(default=Path("bench/allreduce.csv"), metadata={"help": "CSV file"})
    plot: Path | None = field(default=None, metadata={"help": "a CSV file whose page is drawn again, nothing measured"})

    def __post_init__(self) -> None:
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default and each.name != "plot"]
        if self.plot is not None and given:
            raise FcEvalError(f"plot={self.plot} measures nothing: leave out {', '.join(given)}")
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.virtual not in ("true", "false"):
            raise unknown("virtual", self.virtual, ["true", "false"])
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        if not 2 <= self.ranks <= 8:
            raise FcEvalError(f"ranks={self.ranks} is not possible: expected 2 to 8")
        row_bytes = HIDDEN * DTYPES[self.dtype].itemsize
        for kib in self.kib:
            if kib < 1 or kib * 1024 % row_bytes:
                raise FcEvalError(f"kib={kib} is not possible: expected a multiple of {row_bytes // 1024}")
        for name in self.formats:
            if not parse_comm(name).is_quantized:
                raise FcEvalError(f"formats: {name} does not quantize, and what does not is measured anyway")


def bench_all_reduce(options: AllReduceBenchOptions, command: str) -> int:
    """Checks, times, prints and writes.

    Raises:
        FcEvalError: no GPU, no peer access, a comm that the kernel does not cover, bytes that differ, or an `out` or
            `plot` that this bench did not write.
    """
    if options.plot is not None:
        print(f"written: {write_page(options.plot)}")
        return 0
    rows_to_keep(options.out, COLUMNS, ADDED)
    rows: list[Row] = in_circle(options.ranks, options.virtual == "true", options.transport, measure, options)
    table = text_table(PRINTED, rows)
    print(table, flush=True)
    merge_csv(options.out, COLUMNS, KEY, rows, ADDED)
    record = options.out.with_name(record_name(options.out.stem, rows[0]["link"], options.ranks))
    device = torch.device("cuda", torch.cuda.current_device())
    record.write_text(f"{provenance(device)}\n\n$ {command}\n{table}\n")
    print(f"written: {options.out}, {record}, {write_page(options.out)}")
    return 0


def measure(circle: Circle, options: AllReduceBenchOptions) -> list[Row]:
    """All rows; every process calls this."""
    comms, dtype = [parse_comm(name) for name in options.formats], DTYPES[options.dtype]
    small = {comm: _check_small(circle, comm, dtype) for comm in comms}
    link_gbps = _link_gbps(circle)
    rows: list[Row] = []
    for kib in options.kib:
        tokens = kib * 1024 // (HIDDEN * dtype.itemsize)
        count = sets_of_buffers(2 * kib * 1024, circle.device)
        sources = [circle.draw(tokens, HIDDEN, dtype, seed) for seed in range(count)]
        everyones = circle.everyones(sources[0])
        row = partial(_row, circle, tokens * HIDDEN * dtype.itemsize, DTYPE_NAMES[dtype], link_gbps)
        nccl_us = None
        for name, calls in _others(circle, sources).items():
            time_us = circle.median_us(calls)
            nccl_us = time_us if name == NCCL else nccl_us
            rows.append(row(name, "", None, "", time_us, nccl_us))
        for comm in comms:
            traffic = traffic_of(comm, circle.world_size, tokens, HIDDEN, DTYPE_NAMES[dtype])
            compared, values = _compare(circle, comm, sources[0], everyones, "the timed values", 0)
            checked = {
                "sqnr_db": f"{_sqnr_db(values, everyones):.1f}",
                "bytes_checked": str(small[comm] + compared),
                "ranks_equal": "yes",
            }
            for blocks in options.blocks:
                if blocks > circle.communicator.most_blocks(dtype):
                    continue
                time_us = circle.median_us([_into(circle, comm, source, blocks) for source in sources])
                _compare(circle, comm, sources[0], everyones, "the timed values, afterwards", blocks)
                found = row(FUSED, comm.algorithm, comm, str(blocks), time_us, nccl_us, traffic.wire_bytes_per_rank)
                rows.append(found | checked)
    return rows


def _into(circle: Circle, comm: Comm, source: torch.Tensor, blocks: int) -> Callable[[], None]:
    """The call on memory that exists already, so that nothing but the kernel is timed."""
    module = circle.communicator.module
    reduce, gather = (format_ints(fmt, module) if fmt is not None else () for fmt in (comm.reduce, comm.gather))
    out, nonfinite = torch.empty_like(source), torch.zeros(2, dtype=torch.int64, device=source.device)
    return partial(circle.communicator.launch, source, comm.algorithm, reduce, gather, out, nonfinite, blocks)


def _row(
    circle: Circle,
    nbytes: int,
    dtype: str,
    link_gbps: float | None,
    implementation: str,
    algorithm: str,
    comm: Comm | None,
    blocks: str,
    time_us: float,
    nccl_us: float | None,
    wire_bytes: int | None = None,
) -> dict[str, str]:
    world = circle.world_size
    sent = 2 * nbytes * (world - 1) // world if wire_bytes is None else wire_bytes
    formats = [] if comm is None else [fmt.name for fmt in comm.formats]
    groups = [] if comm is None else [str(fmt.group_size) for fmt in comm.formats]
    algbw_gbps = nbytes / time_us / 1e3
    return {
        "device": device_name(circle.device),
        "link": circle.link,
        "world_size": str(world),
        "implementation": implementation,
        "algorithm": algorithm,
        "format": "/".join(formats),
        "group_size": "/".join(dict.fromkeys(groups)),
        "size_bytes": str(nbytes),
        "blocks": blocks,
        "time_us": f"{time_us:.2f}",
        "algbw_gbps": f"{algbw_gbps:.1f}",
        "busbw_gbps": f"{algbw_gbps * 2 * (world - 1) / world:.1f}",
        "wire_bytes": str(sent),
        "link_fraction": "" if link_gbps is None else f"{sent / time_us / 1e3 / link_gbps:.3f}",
        "ratio_to_nccl": "" if nccl_us is None else f"{nccl_us / time_us:.2f}",
        "sqnr_db": "",
        "bytes_checked": "",
        "ranks_equal": "",
        "dtype": dtype,
    }


def _check_small(circle: Circle, comm: Comm, dtype: torch.dtype) -> int:
    compared = 0
    for seed, shape in enumerate(SMALL_SHAPES):
        everyones = awkward_values((circle.world_size, *shape), dtype, seed).to(circle.device)
        own = everyones if circle.ranks is None else everyones[circle.ranks.rank]
        compared += _compare(circle, comm, own, everyones, "awkward values", 0)[0]
    return compared


def _sqnr_db(values: torch.Tensor, everyones: torch.Tensor) -> float:
    exact = everyones.double().sum(0)
    noise = (values.double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def _compare(
    circle: Circle, comm: Comm, own: torch.Tensor, everyones: torch.Tensor, where: str, blocks: int
) -> tuple[int, torch.Tensor]:
    """Bytes compared with the emulator's on this process, and the values of one rank."""
    values, _ = circle.communicator.all_reduce(own, comm, blocks)
    expected = all_reduce(everyones, comm, get_codec("auto", comm.formats, own.dtype, own.device)[0]).values
    found = values.reshape(-1, *expected.shape)
    differs = int((found.view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum())
    circle.communicator.check()
    for rank, count in enumerate(circle.gather(differs)):
        if count:
            raise FcEvalError(
                f"the fused kernel differs from the emulator in {count} bytes on rank {rank} "
                f"for {comm.name} ({where}): "
                "nothing was timed that could be reported; do not use reducer=fused, and build the native code again"
            )
    return found.nbytes, found[0]


def _others(circle: Circle, sources: list[torch.Tensor]) -> dict[str, list[Callable[[], object]]]:
    """What else all-reduces here: NCCL, and PyTorch's two-shot where symmetric memory works."""
    if circle.ranks is None or not circle.has_link:
        return {}
    group = circle.ranks.group
    targets = [source.clone() for source in sources]
    found: dict[str, list[Callable[[], object]]] = {
        NCCL: [partial(dist.all_reduce, target, group=group) for target in targets]
    }
    try:
        from torch.distributed import _symmetric_memory as symmetric

        shared = [symmetric.empty(source.shape, dtype=source.dtype, device=source.device) for source in sources]
        for tensor in shared:
            symmetric.rendezvous(tensor, group.group_name)
        reason = ""
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    reasons = [text for text in circle.gather(reason) if text]
    if reasons:
        if circle.is_first:
            print(f"no row for symmetric memory: {reasons[0]}", flush=True)
    elif sources[0].dtype != torch.float16:
        two_shot = torch.ops.symm_mem.two_shot_all_reduce_
        found[TWO_SHOT] = [partial(two_shot, tensor, "sum", group.group_name) for tensor in shared]
    return found


def _link_gbps(circle: Circle) -> float | None:
    """GB/s of a copy from every GPU at once, to the next one or to pinned memory of the host; None without a link."""
    if circle.ranks is None or not circle.has_link:
        return None
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=circle.device)
    if circle.communicator.staged:
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    else:
        there = torch.device("cuda", (circle.ranks.rank + 1) % torch.cuda.device_count())
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=there)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    target.copy_(source)
    times_us = []
    for _ in range(10):
        circle.gather(None)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1e3)
    return float(min(circle.gather(COPY_BYTES / sorted(times_us)[len(times_us) // 2] / 1e3)))
