"""Time to first token under real tensor parallelism, a comm beside the framework's own all-reduce in the same run.

    fc-eval bench ttft model=llama3_8b tp=2 batch=1,8 tokens=1024 comm=int8,int4 weights=bf16,w8a8
    fc-eval bench ttft model=tiny device=cpu reducer=torch tp=2 batch=1 tokens=32 comm=int8

One process per rank, each with a GPU and its shard of random weights in a preset's shape (`layers=4`: as many of them).
A prefill runs from the ids to the logits of the last token; time does not depend on the values, and no kernel is
compiled, so norms, rope, activation and, under w8a8, quantizing activations are passes of their own. w8a8
is the arithmetic of `model.weights=w8a8`.

Correct first: hidden states under each comm are compared with those of the emulator in the loop (reducer=gathered), bit
for bit and on every rank, before anything is timed. Then the comms, `plain`, which is NCCL on GPUs, and PyTorch's
two-shot in symmetric memory, with the copy into it, take turns; `ttft_ms` is the median of `rounds` of them on the
slowest rank, `spread_ms` the difference of the quartiles there, `ratio_to_nccl` plain's median over it. Parts are timed
in rounds of their own, with events around them. On GPUs passes are CUDA graphs (graph=false: one launch at a time).
reducer=staged has NCCL do without peer access, too. Rows are written point by point; after `seconds` no point is begun.
reducer=torch sends the same bytes without a fused kernel: such rows say "(unfused)" in their column `algorithm`, and
predictions are not compared with them.

Writes the CSV file that `fc-eval predict` and `fc-eval calibrate rows=` read (rows of other machines stay), and beside
it the table with hardware, versions and the command.
"""

import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fc_eval.bench.group import in_group
from fc_eval.bench.machine import DEVICES, device_name, device_of, provenance
from fc_eval.bench.passes import Times, Way, symmetric_two_shot, timed
from fc_eval.bench.prefill import RankPrefill, Reduce, check_split
from fc_eval.bench.table import Row, merge_csv, rows_to_keep, text_table
from fc_eval.codec.select import get_codec
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.reducers import Reducer, get_reducer
from fc_eval.errors import FcEvalError, unknown
from fc_eval.predict.break_even import UNQUANTIZED
from fc_eval.predict.rows import COLUMNS as READ
from fc_eval.predict.rows import KEY, OWN, PEER_LINK, TWO_SHOT, UNFUSED
from fc_eval.predict.shapes import named_shape
from fc_eval.predict.work import WEIGHTS, Prefill

COLUMNS = (*READ, "spread_ms", "launch")
# Of the check: small, since it gathers every raw partial sum.
CHECK_TOKENS = 64
REDUCERS = ("fused", "staged", "torch")


@dataclass(frozen=True)
class TtftBenchOptions:
    """What `fc-eval bench ttft` is asked for."""

    model: str = field(
        default="llama3_8b", metadata={"help": "a name in conf/model, or a checkpoint's folder: its shape"}
    )
    layers: int | None = field(default=None, metadata={"help": "decoder layers (default: all)"})
    tp: int = field(default=2, metadata={"help": "W, ranks"})
    batch: tuple[int, ...] = field(default=(1, 8), metadata={"help": "prompts"})
    tokens: tuple[int, ...] = field(default=(1024,), metadata={"help": "of each prompt"})
    points: tuple[str, ...] = field(default=(), metadata={"help": "such as 1x512,64x512 instead of batch and tokens"})
    comm: tuple[str, ...] = field(default=("int8", "int4_int8", "int4"), metadata={"help": "as in `fc-eval run comm=`"})
    weights: tuple[str, ...] = field(default=("bf16",), metadata={"help": "bf16, w8a8"})
    reducer: str = field(default="fused", metadata={"help": "fused, staged or torch"})
    device: str = field(default="cuda", metadata={"help": "cuda or cpu"})
    link: str | None = field(
        default=None, metadata={"help": "its name for the table, such as pcie4 (default: peer, or staged)"}
    )
    rounds: int = field(default=7, metadata={"help": "of each comm, after two that warm up"})
    graph: str = field(default="true", metadata={"help": "false: no CUDA graph"})
    seconds: float = field(default=float("inf"), metadata={"help": "after which no point is begun"})
    vocabulary: int = field(default=128256, metadata={"help": "rows of the head"})
    out: Path = field(default=OWN, metadata={"help": "CSV file"})

    def __post_init__(self) -> None:
        for kind, value, known in (("device", self.device, DEVICES), ("reducer", self.reducer, REDUCERS)):
            if value not in known:
                raise unknown(kind, value, known)
        for name in self.weights:
            if name not in WEIGHTS:
                raise unknown("weights", name, WEIGHTS)
        if self.device == "cpu" and self.reducer != "torch":
            raise FcEvalError(f"reducer={self.reducer} reduces between GPUs, but device=cpu: use reducer=torch")
        for name in ("layers", "rounds"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise FcEvalError(f"{name}={count} is not possible: expected 1 or more")
        if self.graph not in ("true", "false"):
            raise unknown("graph", self.graph, ["true", "false"])
        for name in self.comm:
            comm = parse_comm(name)
            comm.check_between_ranks()
            if not comm.is_quantized:
                raise FcEvalError(f"comm: {name} does not quantize, and plain is measured anyway")
        for prefill in self.prefills:  # a mistake in the last one is not found after minutes of the first
            check_split(prefill)

    @property
    def prefills(self) -> list[Prefill]:
        """Every combination, those of one kind of weights together."""
        shape = named_shape(self.model)
        if self.layers is not None:
            shape = replace(shape, layers=self.layers)
        return [
            Prefill(shape, self.tp, batch, tokens, weights, self.vocabulary)
            for weights in self.weights
            for batch, tokens in self.sizes
        ]

    @property
    def captures(self) -> bool:
        """Whether passes are CUDA graphs."""
        return self.device == "cuda" and self.graph == "true"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Prompts and tokens of each point."""
        if not self.points:
            return [(batch, tokens) for batch in self.batch for tokens in self.tokens]
        found = [re.fullmatch(r"(\d+)x(\d+)", point) for point in self.points]
        for point, match in zip(self.points, found, strict=True):
            if match is None:
                raise FcEvalError(f"points: {point!r} is no point: expected BATCHxTOKENS, such as 8x1024")
        return [(int(match[1]), int(match[2])) for match in found if match is not None]


def bench_ttft(options: TtftBenchOptions, command: str) -> int:
    """Checks, times, prints and writes.

    Raises:
        FcEvalError: fewer GPUs than ranks, a shape that W does not divide, or values that differ.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise FcEvalError(
            "bench ttft needs two CUDA devices or more, and torch sees none here; device=cpu reducer=torch model=tiny "
            "shows how it works, and its times say nothing of GPUs"
        )
    rows_to_keep(options.out, COLUMNS)
    rows: list[Row] = in_group(options.device, options.tp, measure, options)
    table = text_table(COLUMNS, rows)
    print(table, flush=True)
    record = options.out.with_name(f"{options.out.stem}_{options.device}_w{options.tp}.txt")
    record.write_text(f"{provenance(device_of(options.device))}\n\n$ {command}\n{table}\n")
    print(f"written: {options.out}, {record}")
    return 0


def measure(ranks: Ranks, device: torch.device, options: TtftBenchOptions) -> list[Row]:
    """All rows; every rank calls this."""
    if options.reducer == "staged":  # read when NCCL is first used, which is not yet
        os.environ["NCCL_P2P_DISABLE"], os.environ["NCCL_NVLS_ENABLE"] = "1", "0"
    comms = [parse_comm(name) for name in options.comm]
    reducer, gathered = (get_reducer(name, ranks, device) for name in (options.reducer, "gathered"))

    def reduce_with(comm: Comm, how: Reducer) -> Reduce:
        codec = get_codec("auto", comm.formats, torch.bfloat16, device)[0]
        return lambda partial_TH: how(partial_TH, comm, codec).values

    rows: list[Row] = []
    model: RankPrefill | None = None
    begun = time.monotonic()
    for prefill in options.prefills:
        where = f"{prefill.weights}, {prefill.batch} x {prefill.tokens}"
        if rows and max(ranks.gather(time.monotonic() - begun)) > options.seconds:
            _say(ranks, f"left out: {where}: seconds={options.seconds:g} are over")
            continue
        if model is None or model.prefill.weights != prefill.weights:
            model = None  # the weights before go first
            model = RankPrefill(prefill, ranks.rank, device)
            for comm in comms:
                _check(model, ranks, comm.name, reduce_with(comm, reducer), reduce_with(comm, gathered))
            _say(ranks, f"{prefill.weights}: hidden states are the emulator's under {', '.join(options.comm)}")
        own = "nccl" if device.type == "cuda" else "gloo"
        reduces: dict[Way, Reduce] = {(UNQUANTIZED, own): ranks.all_reduce_}  # in place, as a serving system calls it
        if options.reducer == "fused":
            two_shot = symmetric_two_shot(ranks, prefill.rows, prefill.shape.hidden, device)
            if isinstance(two_shot, str):
                _say(ranks, f"no row for symmetric memory: {two_shot}")
            else:
                reduces[UNQUANTIZED, TWO_SHOT] = two_shot
        unfused = UNFUSED if reducer.name == "torch" else ""
        reduces |= {(comm, f"{comm.algorithm}{unfused}"): reduce_with(comm, reducer) for comm in comms}
        ids_BS = model.ids(prefill.batch, prefill.tokens)
        try:
            found = timed(model, ranks, device, ids_BS, reduces, options.rounds, options.captures)
        except torch.OutOfMemoryError as error:
            said = str(error).splitlines()[0]
            raise FcEvalError(f"{where} does not fit: {said}; leave the point out, rows before it are kept") from error
        reducer.check()
        nccl_ms = found[UNQUANTIZED, own].ttft_ms
        point = [_row(options, prefill, device, way, times, nccl_ms / times.ttft_ms) for way, times in found.items()]
        rows += point
        if ranks.rank == 0:
            merge_csv(options.out, COLUMNS, KEY, point)
        _say(ranks, f"{where}: {time.monotonic() - begun:.0f} s")
    return rows


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


def _check(model: RankPrefill, ranks: Ranks, name: str, reduce: Reduce, oracle: Reduce) -> None:
    """Makes sure that hidden states are those of the emulator in the loop, on every rank.

    Raises:
        FcEvalError: they are not.
    """
    ids_BS = model.ids(1, min(CHECK_TOKENS, model.prefill.tokens))
    with torch.inference_mode():
        (_, ours_TH), (_, expected_TH) = model(ids_BS, reduce), model(ids_BS, oracle)
    differs = int((ours_TH.view(torch.uint8) != expected_TH.view(torch.uint8)).sum())
    for rank, count in enumerate(ranks.gather(differs)):
        if count:
            raise FcEvalError(
                f"hidden states under {name} differ from the emulator's in {count} bytes on rank {rank}: nothing was "
                "timed that could be reported"
            )


def _row(
    options: TtftBenchOptions, prefill: Prefill, device: torch.device, way: Way, times: Times, ratio: float
) -> Row:
    layers = "" if options.layers is None else f"[{options.layers} layers]"
    comm, algorithm = way
    link = options.link or ("staged" if options.reducer == "staged" else PEER_LINK)
    found = (
        *(device_name(device), link, str(prefill.world_size), f"{options.model}{layers}", prefill.weights),
        *(str(prefill.batch), str(prefill.tokens), comm.name, algorithm, f"{times.ttft_ms:.3f}"),
        *(f"{times.parts_ms[name]:.3f}" for name in ("comm_ms", "gemm_ms", "attention_ms", "other_ms")),
        *(f"{ratio:.3f}", f"{times.spread_ms:.3f}"),
        "graph" if options.captures else "eager",
    )
    return dict(zip(COLUMNS, found, strict=True))
