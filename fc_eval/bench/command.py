"""`fc-eval bench codec|emulation|allreduce|ttft|int8 KEY=VALUE ...`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fc_eval.bench.options import describe_options, read_options
from fc_eval.errors import unknown


@dataclass(frozen=True)
class Bench:
    """One measurement: its options, what it does, and its help text."""

    options: type[Any]
    run: Callable[[Any, str], int]
    text: str


def _codec() -> Bench:
    from fc_eval.bench import codec

    return Bench(codec.CodecBenchOptions, codec.bench_codec, codec.__doc__ or "")


def _emulation() -> Bench:
    from fc_eval.bench import emulation

    return Bench(emulation.EmulationBenchOptions, emulation.bench_emulation, emulation.__doc__ or "")


def _allreduce() -> Bench:
    from fc_eval.bench import allreduce

    return Bench(allreduce.AllReduceBenchOptions, allreduce.bench_all_reduce, allreduce.__doc__ or "")


def _ttft() -> Bench:
    from fc_eval.bench import ttft

    return Bench(ttft.TtftBenchOptions, ttft.bench_ttft, ttft.__doc__ or "")


def _int8() -> Bench:
    from fc_eval.bench import int8

    return Bench(int8.Int8BenchOptions, int8.bench_int8, int8.__doc__ or "")


BENCHES: dict[str, Callable[[], Bench]] = {
    "codec": _codec,
    "emulation": _emulation,
    "allreduce": _allreduce,
    "ttft": _ttft,
    "int8": _int8,
}

USAGE = """\
usage: fc-eval bench NAME [KEY=VALUE] ...

  codec       speed of the codecs beside a copy, bytes checked first
  emulation   a model's forward under a quantized comm over the same under plain
  allreduce   the fused all-reduce beside NCCL, bytes checked first (needs a GPU)
  ttft        time to first token under real tensor parallelism beside NCCL, values checked first (needs two GPUs)
  int8        linear layers with INT8 weights and activations beside bf16, sums checked first

`fc-eval bench NAME --help` says what is measured and lists the keys. Nothing is fetched; no network is needed.
"""


def bench(words: Sequence[str]) -> int:
    """Runs one measurement; returns the exit status.

    Raises:
        FcEvalError: an unknown name or option, or whatever the measurement finds wrong.
    """
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    name, *rest = words
    if name not in BENCHES:
        raise unknown("bench", name, BENCHES, hint="`fc-eval bench --help` describes them")
    chosen = BENCHES[name]()
    if any(word in ("-h", "--help") for word in rest):
        print(f"{chosen.text.strip()}\n\noptions and their defaults:\n{describe_options(chosen.options)}")
        return 0
    return chosen.run(read_options(chosen.options, rest), f"fc-eval bench {' '.join(words)}")
