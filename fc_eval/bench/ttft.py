"""Time to first token under real tensor parallelism, a comm beside the framework's own all-reduce in the same run.

    fc-eval bench ttft model=llama3_8b tp=2 batch=1,8 tokens=1024 comm=int8,int4 weights=bf16,w8a8
    fc-eval bench ttft model=tiny device=cpu reducer=torch tp=2 batch=1 tokens=32 comm=int8

One process per rank, each with a GPU and its shard of random weights in a preset's shape (`layers=4`: as many of them).
A prefill runs from the ids to the logits of the last token; time does not depend on the values, and no kernel is
compiled or captured, so norms, rope, activation and, under w8a8, quantizing activations are passes of their own. w8a8
is the arithmetic of `model.weights=w8a8`.

Correct first: hidden states under each comm are compared with those of the emulator in the loop (reducer=gathered), bit
for bit and on every rank, before anything is timed. Then the comms and `plain`, which is NCCL on GPUs, take turns;
`ttft_ms` is the median of `rounds` of them on the slowest rank, `ratio_to_nccl` that of plain over it. Parts are timed
in rounds of their own, with events around them. reducer=torch sends the same bytes without a fused kernel: such rows
say "(unfused)" in their column `algorithm`, and predictions are not compared with them.

Writes the CSV file that `fc-eval predict` and `fc-eval calibrate rows=` read (rows of other machines stay), and beside
it the table with hardware, versions and the command.
"""

import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fc_eval.bench.group import in_group
from fc_eval.bench.link import drain
from fc_eval.bench.machine import DEVICES, device_name, device_of, provenance
from fc_eval.bench.prefill import RankPrefill, Reduce, check_split
from fc_eval.bench.table import Row, merge_csv, text_table
from fc_eval.codec.select import get_codec
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.reducers import Reducer, get_reducer
from fc_eval.errors import FcEvalError, unknown
from fc_eval.predict.break_even import UNQUANTIZED
from fc_eval.predict.rows import COLUMNS, KEY, OWN, PARTS, PEER_LINK, UNFUSED
from fc_eval.predict.shapes import named_shape
from fc_eval.predict.work import WEIGHTS, Prefill

WARM_ROUNDS = 2
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
    comm: tuple[str, ...] = field(default=("int8", "int4_int8", "int4"), metadata={"help": "as in `fc-eval run comm=`"})
    weights: tuple[str, ...] = field(default=("bf16",), metadata={"help": "bf16, w8a8"})
    reducer: str = field(default="fused", metadata={"help": "fused, staged or torch"})
    device: str = field(default="cuda", metadata={"help": "cuda or cpu"})
    link: str | None = field(
        default=None, metadata={"help": "its name for the table, such as pcie4 (default: peer, or staged)"}
    )
    rounds: int = field(default=7, metadata={"help": "of each comm, after two that warm up"})
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
            for batch in self.batch
            for tokens in self.tokens
        ]


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
    rows: list[Row] = in_group(options.device, options.tp, measure, options)
    table = text_table(COLUMNS, rows)
    print(table, flush=True)
    merge_csv(options.out, COLUMNS, KEY, rows)
    record = options.out.with_name(f"{options.out.stem}_{options.device}_w{options.tp}.txt")
    record.write_text(f"{provenance(device_of(options.device))}\n\n$ {command}\n{table}\n")
    print(f"written: {options.out}, {record}")
    return 0


def measure(ranks: Ranks, device: torch.device, options: TtftBenchOptions) -> list[Row]:
    """All rows; every rank calls this."""
    comms = [parse_comm(name) for name in options.comm]
    reducer, gathered = (get_reducer(name, ranks, device) for name in (options.reducer, "gathered"))

    def reduce_with(comm: Comm, how: Reducer) -> Reduce:
        if comm == UNQUANTIZED:
            return ranks.all_reduce_  # in place, as a serving system calls it
        codec = get_codec("auto", comm.formats, torch.bfloat16, device)[0]
        return lambda partial_TH: how(partial_TH, comm, codec).values

    rows: list[Row] = []
    model: RankPrefill | None = None
    for prefill in options.prefills:
        if model is None or model.prefill.weights != prefill.weights:
            model = None  # the weights before go first
            model = RankPrefill(prefill, ranks.rank, device)
            for comm in comms:
                _check(model, ranks, comm.name, reduce_with(comm, reducer), reduce_with(comm, gathered))
        reduces = {comm: reduce_with(comm, reducer) for comm in (UNQUANTIZED, *comms)}
        ids_BS = model.ids(prefill.batch, prefill.tokens)
        times_ms, parts_ms = _time(model, ranks, device, ids_BS, reduces, options.rounds)
        for comm in reduces:
            ratio = times_ms[UNQUANTIZED] / times_ms[comm]
            rows.append(_row(options, prefill, device, comm, reducer.name, times_ms[comm], parts_ms[comm], ratio))
    return rows


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


def _time(
    model: RankPrefill,
    ranks: Ranks,
    device: torch.device,
    ids_BS: torch.Tensor,
    reduces: dict[Comm, Reduce],
    rounds: int,
) -> tuple[dict[Comm, float], dict[Comm, dict[str, float]]]:
    """Milliseconds of a prefill by comm, medians on the slowest rank, and of its parts on the first rank."""
    whole: dict[Comm, list[float]] = {comm: [] for comm in reduces}
    parts: dict[Comm, list[dict[str, float]]] = {comm: [] for comm in reduces}
    for turn in range(WARM_ROUNDS + 2 * rounds):
        model.watch.on = turn >= WARM_ROUNDS + rounds
        for comm, reduce in reduces.items():
            drain(device)
            ranks.gather(None)  # ranks begin together
            started = time.perf_counter()
            with torch.inference_mode():
                model(ids_BS, reduce)
            drain(device)
            spent_ms = 1e3 * (time.perf_counter() - started)
            if model.watch.on:
                taken = model.watch.take_ms()
                parts[comm].append(taken | {"other_ms": spent_ms - sum(taken.values())})
            elif turn >= WARM_ROUNDS:
                whole[comm].append(spent_ms)
    model.watch.on = False
    times_ms = {comm: max(ranks.gather(statistics.median(times))) for comm, times in whole.items()}
    return times_ms, {
        comm: {name: statistics.median(each[name] for each in found) for name in PARTS} for comm, found in parts.items()
    }


def _row(
    options: TtftBenchOptions,
    prefill: Prefill,
    device: torch.device,
    comm: Comm,
    reducer: str,
    ttft_ms: float,
    parts_ms: dict[str, float],
    ratio: float,
) -> Row:
    layers = "" if options.layers is None else f"[{options.layers} layers]"
    algorithm = comm.algorithm
    if comm == UNQUANTIZED:
        algorithm = "nccl" if device.type == "cuda" else "gloo"
    elif reducer == "torch":
        algorithm += UNFUSED
    link = options.link or ("staged" if reducer == "staged" else PEER_LINK)
    found = (
        *(device_name(device), link, str(prefill.world_size), f"{options.model}{layers}", prefill.weights),
        *(str(prefill.batch), str(prefill.tokens), comm.name, algorithm, f"{ttft_ms:.3f}"),
        *(f"{parts_ms[name]:.3f}" for name in ("comm_ms", "gemm_ms", "attention_ms", "other_ms")),
        f"{ratio:.3f}",
    )
    return dict(zip(COLUMNS, found, strict=True))
