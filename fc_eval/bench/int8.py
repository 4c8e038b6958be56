"""How fast linear layers with INT8 weights and activations are, beside bf16 in the same run.

    fc-eval bench int8 [device=cuda] [tokens=1,64,1024,8192] [shapes=4096x4096,...]

The shapes are NxK, output by input features: those of LLaMA-3-8B (`config.json` of its checkpoint) are q and o
(4096x4096), k and v (1024x4096), gate and up (14336x4096) and down (4096x14336). Three calls take turns:

    bf16      functional.linear in bf16
    w8a8      what a layer of `model.weights=w8a8` does: activations quantized by token, product, scales
    product   the product of the INT8 codes alone

Values first: sums of codes are compared with fp64 sums of the same codes, which are exact, so they must be equal; then
the layer's output with those sums scaled in fp32, bit for bit. A difference is an error, and no row.

`speed_up` is the time of bf16 over that of a row, `tops` the operations (2 T K N) in 1e12 per second. On a GPU medians
of CUDA graph replays, so launches are not in them; without graphs, calls of few tokens take as long as their launches.
`product` is torch._int_mm there, `w8a8` what the first line printed says. A CPU multiplies codes as fp32, so its ratio
says nothing of INT8 units.

Writes the CSV file (rows of other devices and shapes stay) and beside it a text file with the printed table, hardware,
versions and the command.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from fc_eval.bench.machine import device_name, device_of, provenance, use_threads
from fc_eval.bench.table import Row, merge_csv, rows_to_keep, text_table
from fc_eval.bench.timing import Timed, median_times_us, sets_of_buffers
from fc_eval.errors import FcEvalError
from fc_eval.weights.int8 import MAX_FEATURES, Rows, int_product, product, quantize_rows, way_of_products

COLUMNS = ("device", "outputs", "features", "tokens", "op", "time_us", "tops", "speed_up", "sums_checked")
KEY = COLUMNS[:5]
MOST_CHECKED = 512  # tokens: fp64 products of more would take longer than all that is timed
LLAMA3_8B = ("4096x4096", "1024x4096", "14336x4096", "4096x14336")


@dataclass(frozen=True)
class Int8BenchOptions:
    """What `fc-eval bench int8` is asked for."""

    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    shapes: tuple[str, ...] = field(default=LLAMA3_8B, metadata={"help": "NxK, output by input features"})
    tokens: tuple[int, ...] = field(default=(1, 64, 1024, 8192), metadata={"help": "rows of activations"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: torch's)"})
    out: Path = field(default=Path("bench/int8.csv"), metadata={"help": "CSV file"})

    def __post_init__(self) -> None:
        for shape in self.shapes:
            outputs, features = _sizes(shape)
            if outputs < 1 or not 1 <= features <= MAX_FEATURES:
                raise FcEvalError(
                    f"shape {shape!r} is not possible: expected N from 1 on and K from 1 to {MAX_FEATURES}"
                )
        if any(tokens < 1 for tokens in self.tokens):
            raise FcEvalError(f"tokens={self.tokens} is not possible: expected 1 or more")


def _sizes(shape: str) -> tuple[int, int]:
    outputs, _, features = shape.partition("x")
    if not (outputs.isdecimal() and features.isdecimal()):
        raise FcEvalError(f"shape {shape!r} is not NxK: expected output by input features, such as 4096x14336")
    return int(outputs), int(features)


def bench_int8(options: Int8BenchOptions, command: str) -> int:
    """Checks, times, prints and writes.

    Raises:
        FcEvalError: no such device, a file that rows cannot be added to, or sums or outputs that differ.
    """
    rows_to_keep(options.out, COLUMNS)
    device = device_of(options.device)
    use_threads(options.threads)
    torch.manual_seed(0)
    way = f"w8a8: {way_of_products(device)}"
    print(way, flush=True)
    rows: list[Row] = []
    for outputs, features in map(_sizes, options.shapes):
        weight = torch.randn(outputs, features, device=device).to(torch.bfloat16)
        for tokens in options.tokens:
            rows += _measure(weight, tokens, device)
    table = text_table(COLUMNS[1:], rows)
    print(table, flush=True)
    merge_csv(options.out, COLUMNS, KEY, rows)
    record = options.out.with_name(f"{options.out.stem}_{device.type}.txt")
    record.write_text(f"{provenance(device)}\n{way}\n\n$ {command}\n{table}\n")
    print(f"written: {options.out}, {record}")
    return 0


def check(x_TK: torch.Tensor, weight: Rows) -> int:
    """Compares sums and outputs of up to `MOST_CHECKED` tokens with exact ones; returns how many sums.

    The layer gets all tokens, since their number decides how a GPU computes.

    Raises:
        FcEvalError: some differ.
    """
    some = torch.linspace(0, len(x_TK) - 1, min(len(x_TK), MOST_CHECKED)).long()  # the first, the last, between
    x = quantize_rows(x_TK[some])
    exact_TN = x.codes.double() @ weight.codes.double().t()  # |sum| < 2^31, and fp64 adds whole numbers below 2^53
    wrong = int((int_product(x.codes, weight.codes) != exact_TN).sum())
    scaled_TN = (exact_TN.float() * weight.scale * x.scale[:, None]).to(x_TK.dtype)
    differ = int((product(x_TK, weight)[some] != scaled_TN).sum())
    if wrong or differ:
        raise FcEvalError(
            f"{wrong} of {exact_TN.numel()} sums of INT8 codes and {differ} outputs are not what exact sums give "
            f"({len(exact_TN)} of {len(x_TK)} tokens, weight {tuple(weight.codes.shape)}): nothing was timed; the INT8 "
            "product of this "
            "device or version of torch cannot be used"
        )
    return exact_TN.numel()


def _measure(weight_NK: torch.Tensor, tokens: int, device: torch.device) -> Iterator[Row]:
    outputs, features = weight_NK.shape
    # As many copies of the weight as exceed the caches: a layer of a model finds its own in memory.
    weights = [weight_NK.clone() for _ in range(sets_of_buffers(weight_NK.nbytes, device))]
    quantized = [Rows(codes.clone(), scale) for codes, scale in [quantize_rows(weight_NK)] for _ in weights]
    x_TK = torch.randn(tokens, features, device=device).to(torch.bfloat16)
    checked = check(x_TK, quantized[0])
    codes_TK = quantize_rows(x_TK).codes
    calls = {
        "bf16": [partial(functional.linear, x_TK, each) for each in weights],
        "w8a8": [partial(product, x_TK, each) for each in quantized],
        "product": [partial(int_product, codes_TK, each.codes) for each in quantized],
    }
    times = median_times_us([Timed(each) for each in calls.values()], device)
    for op, time_us in zip(calls, times, strict=True):
        yield {
            "device": device_name(device),
            "outputs": str(outputs),
            "features": str(features),
            "tokens": str(tokens),
            "op": op,
            "time_us": f"{time_us:.1f}",
            "tops": f"{2 * tokens * features * outputs / time_us / 1e6:.3g}",
            "speed_up": f"{times[0] / time_us:.3f}",
            "sums_checked": "0" if op == "bf16" else str(checked),
        }
