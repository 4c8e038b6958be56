"""How fast the codecs are, beside a copy of the same values in the same run.

    fc-eval bench codec [device=cuda] [formats=int4-g32,int8-g128] [mib=64] [dtype=bf16]

Every codec that is here and covers a format (the PyTorch reference, the native CPU codec or the CUDA codec) runs
encode, decode, qdq (values to fp32 values, no bytes made) and the emulated two-step all-reduce of W partial sums.

Bytes first: each result is compared with the reference's, on small awkward inputs before anything is timed and on the
timed buffers themselves afterwards. `bytes_checked` counts the bytes that were compared; a difference is an error and
no row. Then the codecs take turns with a copy of the same values (`Tensor.copy_`, one partial sum at a time: on an
H200 a single copy of 512 MiB ran at two thirds of the rate of eight of 64 MiB), each over several sets of buffers that
together exceed the caches, and the median is kept. On a GPU: CUDA events around replays of graphs of 16 calls or more
(plain calls for the reference, which allocates), after the clocks have risen. On the CPU: wall clock, as many threads
as torch uses.

`gbps` is the bytes that must be read and written once over the time, in 1e9 bytes per second: encode reads the values
and writes the message, decode reads the message and writes fp32, qdq reads the values and writes fp32, two_step reads W
partial sums and writes one. `fraction_of_copy` is `gbps` over the copy's, which counts bytes read and written too.
`elements` are those of one tensor of values, of one partial sum for two_step; the two-step's partial sums have the size
asked for on a GPU, and have it together on the CPU, where the reference would take minutes otherwise.

Writes the CSV file (rows of other devices and formats stay, the same ones are replaced) and beside it a text file with
the printed table, hardware, versions and the command.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from fc_eval.bench.bytes import check_small, same_bytes
from fc_eval.bench.machine import device_name, device_of, provenance, use_threads
from fc_eval.bench.operations import Problem, call_into, result_of, writes_into_buffers
from fc_eval.bench.table import Row, merge_csv, rows_to_keep, text_table
from fc_eval.bench.timing import Timed, median_times_us, sets_of_buffers
from fc_eval.codec.base import DTYPES, Codec
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.codec.select import LOADERS, codecs_available, get_codec
from fc_eval.errors import FcEvalError, unknown
from fc_eval.wire.format import WireFormat, parse_format

COLUMNS = (
    *("device", "codec", "format", "group_size", "op", "elements", "time_us", "gbps", "fraction_of_copy"),
    "bytes_checked",
)
KEY = ("device", "codec", "format", "op", "elements")
PRINTED = (*COLUMNS[1:3], *COLUMNS[4:], "speed-up")
HIDDEN = 4096


@dataclass(frozen=True)
class CodecBenchOptions:
    """What `fc-eval bench codec` is asked for."""

    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    formats: tuple[str, ...] = field(
        default=("int4-g32", "int4-g128", "int8-g32", "int8-g128"), metadata={"help": "wire formats"}
    )
    mib: int | None = field(default=None, metadata={"help": "size of one tensor of values in MiB (default 64)"})
    elements: int | None = field(default=None, metadata={"help": f"its elements instead, a multiple of {HIDDEN}"})
    dtype: str = field(default="bf16", metadata={"help": "bf16, fp16 or fp32"})
    ranks: tuple[int, ...] = field(default=(8, 4), metadata={"help": "W of the two-step all-reduces"})
    codecs: tuple[str, ...] = field(default=("reference", "cpu", "cuda"), metadata={"help": "those to be timed"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: torch's)"})
    out: Path | None = field(
        default=None, metadata={"help": "CSV file (default bench/codec.csv, codec_DTYPE.csv where not bf16)"}
    )

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        for name in self.codecs:
            if name not in LOADERS:
                raise unknown("codec", name, LOADERS)
        if self.mib is not None and self.elements is not None:
            raise FcEvalError("mib and elements both say how large the tensor is: keep one of the two")
        if self.tokens < 1 or (self.elements or 0) % HIDDEN:
            raise FcEvalError(f"a tensor of this size cannot be timed: expected at least one row of {HIDDEN} elements")
        for name in self.formats:
            parse_format(name)  # a mistake in the last one is not found after minutes of the first
        if any(ranks < 2 for ranks in self.ranks):
            raise FcEvalError(f"ranks={self.ranks} is not possible: a two-step all-reduce needs 2 ranks or more")

    @property
    def tokens(self) -> int:
        """T, rows of `HIDDEN` elements."""
        if self.elements is not None:
            return self.elements // HIDDEN
        return ((64 if self.mib is None else self.mib) << 20) // (DTYPES[self.dtype].itemsize * HIDDEN)

    @property
    def csv_path(self) -> Path:
        """Where the rows go."""
        return self.out or Path("bench") / ("codec.csv" if self.dtype == "bf16" else f"codec_{self.dtype}.csv")


def bench_codec(options: CodecBenchOptions, command: str) -> int:
    """Checks, times, prints and writes.

    Raises:
        FcEvalError: no such device, a format that no codec or only one covers, or bytes that differ.
    """
    device = device_of(options.device)
    rows_to_keep(options.csv_path, COLUMNS)
    use_threads(options.threads)
    dtype = DTYPES[options.dtype]
    rows: list[Row] = []
    tables = []
    for name in options.formats:
        fmt = parse_format(name)
        codecs, oracle = _codecs(options.codecs, fmt, dtype, device)
        found = []
        for problem in _problems(options, fmt, device):
            found += _measure(problem, codecs, oracle, device)
        rows += [{column: row[column] for column in COLUMNS} for row in found]
        tables.append(text_table(PRINTED, found))
        print(tables[-1], flush=True)
    merge_csv(options.csv_path, COLUMNS, KEY, rows)
    record = options.csv_path.with_name(f"{options.csv_path.stem}_{device.type}.txt")
    record.write_text(f"{provenance(device)}\n\n$ {command}\n" + "\n".join(tables) + "\n")
    print(f"written: {options.csv_path}, {record}")
    return 0


def _problems(options: CodecBenchOptions, fmt: WireFormat, device: torch.device) -> list[Problem]:
    make = partial(Problem, fmt=fmt, hidden=HIDDEN, dtype=DTYPES[options.dtype])
    problems = [make(op, tokens=options.tokens) for op in ("encode", "decode", "qdq")]
    for ranks in options.ranks:
        tokens = options.tokens if device.type == "cuda" else max(1, options.tokens // ranks)
        problems.append(make("two_step", tokens=tokens, ranks=ranks))
    return problems


def _codecs(
    names: Sequence[str], fmt: WireFormat, dtype: torch.dtype, device: torch.device
) -> tuple[list[Codec], Codec]:
    """The codecs to be timed, and the one that they are compared with (the reference where it covers the format)."""
    reasons = []
    codecs: list[Codec] = []
    for name in names:
        try:
            codecs.append(get_codec(name, (fmt,), dtype, device)[0])
        except FcEvalError as error:
            reasons.append(str(error).split(";")[0])
    oracle: Codec = ReferenceCodec()
    if oracle.why_not(fmt, dtype, torch.device("cpu")) is not None:
        if codecs_available()["cpu"] is not None or all(codec.name == "cpu" for codec in codecs):
            raise FcEvalError(
                f"the bytes of {fmt} cannot be checked: the reference does not cover it, and no second native codec "
                "does here; leave it out"
            )
        oracle = get_codec("cpu", (fmt,), dtype, "cpu")[0]
    if not codecs:
        raise FcEvalError(f"no codec of {', '.join(names)} can do {fmt} on {device} ({'; '.join(reasons)})")
    return codecs, oracle


def _measure(problem: Problem, codecs: Sequence[Codec], oracle: Codec, device: torch.device) -> list[Row]:
    """One row per codec, with a column `speed-up` over the reference."""
    checked = check_small(codecs, oracle, problem, device)
    values_bytes = problem.dtype.itemsize * torch.Size(problem.values_shape).numel()
    generator = torch.Generator(device).manual_seed(0)
    encoder = codecs[-1]  # the fastest; its bytes were compared above

    def draw() -> torch.Tensor:
        return torch.randn(problem.values_shape, generator=generator, dtype=problem.dtype, device=device)

    sources = [problem.source(draw(), encoder) for _ in range(sets_of_buffers(values_bytes, device))]
    outs = {
        codec.name: [problem.poisoned_output(device) for _ in sources]
        for codec in codecs
        if writes_into_buffers(codec, problem, device)
    }
    copied = [draw() for _ in range(sets_of_buffers(2 * values_bytes, device))]
    copies = [torch.empty_like(values) for values in copied]
    timed = [Timed([partial(_copy, to, values) for to, values in zip(copies, copied, strict=True)])]
    for codec in codecs:
        if writes_into_buffers(codec, problem, device):
            pairs = zip(sources, outs[codec.name], strict=True)
            timed.append(Timed([call_into(codec, problem, source, out) for source, out in pairs]))
        else:
            timed.append(Timed([partial(result_of, codec, problem, source) for source in sources], capturable=False))
    copy_us, *times_us = median_times_us(timed, device)

    there = device if oracle.name == "reference" else torch.device("cpu")
    expected = result_of(oracle, problem, sources[0].to(there))
    moved_bytes = sources[0].nbytes + expected.nbytes
    copy_gbps = 2 * values_bytes / copy_us / 1e3
    times_by_codec = dict(zip((codec.name for codec in codecs), times_us, strict=True))
    rows: list[Row] = []
    for codec, time_us in zip(codecs, times_us, strict=True):
        timed_result = outs[codec.name][0] if codec.name in outs else result_of(codec, problem, sources[0])
        compared = checked[codec.name] + same_bytes(timed_result, expected, codec, problem, "the timed values")
        gbps = moved_bytes / time_us / 1e3
        speed_up = times_by_codec["reference"] / time_us if "reference" in times_by_codec else None
        rows.append(
            {
                "device": device_name(device),
                "codec": codec.name,
                "format": problem.fmt.name,
                "group_size": str(problem.fmt.group_size),
                "op": problem.name,
                "elements": str(problem.tokens * problem.hidden),
                "time_us": f"{time_us:.1f}",
                "gbps": f"{gbps:.1f}",
                "fraction_of_copy": f"{gbps / copy_gbps:.3f}",
                "bytes_checked": str(compared),
                "speed-up": f"{speed_up:.1f}x" if speed_up is not None else "",
            }
        )
    return rows


def _copy(to: torch.Tensor, values: torch.Tensor) -> None:
    for part, source in zip(to.view(-1, *to.shape[-2:]), values.view(-1, *values.shape[-2:]), strict=True):
        part.copy_(source)
