"""The rates of this machine that the cost model of `fc-eval predict` asks for: products, attention, memory, codec.

Each is the median of calls that take turns over buffers which together exceed the caches, as in `bench codec`.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from fc_eval.bench.operations import Problem, call_into, result_of, writes_into_buffers
from fc_eval.bench.timing import Timed, median_times_us, sets_of_buffers
from fc_eval.codec.base import Codec
from fc_eval.codec.select import get_codec
from fc_eval.wire.format import WireFormat


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is timed: a product [m, k] times [k, n], attention over `tokens` tokens of `heads` heads of 128
    for `batch` prompts, and a copy and a codec over [rows, 4096] values in bf16."""

    m: int
    k: int
    n: int
    batch: int
    tokens: int
    heads: int
    rows: int


HIDDEN, HEAD_DIM = 4096, 128
# The products of an 8B model's MLP for 8 prompts of 1024 tokens; a CPU gets what it can do in a second.
GPU_SIZES = Sizes(m=8192, k=4096, n=14336, batch=8, tokens=1024, heads=32, rows=16384)
CPU_SIZES = Sizes(m=256, k=1024, n=1024, batch=1, tokens=256, heads=4, rows=2048)


@dataclass(frozen=True)
class Rates:
    """What is reached: operations in 1e12 and bytes in 1e9 per second; `int8_tops` is None where it was not measured.

    Copies and the codec count bytes read and written; the codec is the mean over an encode and a decode.
    """

    bf16_tflops: float
    int8_tops: float | None
    attention_tflops: float
    copy_gb_per_s: float
    codec_gb_per_s: float
    codec: str


def measure_rates(device: torch.device, sizes: Sizes, fmt: WireFormat) -> Rates:
    """Times everything on one device.

    Raises:
        FcEvalError: no codec here covers the format.
    """
    codec = get_codec("auto", (fmt,), torch.bfloat16, device)[0]
    copy_gb_per_s = _copy(device, sizes)
    return Rates(
        bf16_tflops=_product(device, sizes),
        int8_tops=_int8_product(device, sizes) if device.type == "cuda" else None,
        attention_tflops=_attention(device, sizes),
        copy_gb_per_s=copy_gb_per_s,
        codec_gb_per_s=_codec(codec, device, sizes, fmt),
        codec=codec.name,
    )


def _product(device: torch.device, sizes: Sizes) -> float:
    a, b = (_draw(shape, device) for shape in ((sizes.m, sizes.k), (sizes.k, sizes.n)))
    out = torch.empty((sizes.m, sizes.n), dtype=torch.bfloat16, device=device)
    (time_us,) = median_times_us([Timed([partial(torch.mm, a, b, out=out)])], device)
    return _tera(2 * sizes.m * sizes.k * sizes.n, time_us)


def _int8_product(device: torch.device, sizes: Sizes) -> float:
    a, b = (
        torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        for shape in ((sizes.m, sizes.k), (sizes.n, sizes.k))
    )
    call = partial(torch._int_mm, a, b.t())  # column-major second factor, as the INT8 kernels want it
    (time_us,) = median_times_us([Timed([call], capturable=False)], device)
    return _tera(2 * sizes.m * sizes.k * sizes.n, time_us)


def _attention(device: torch.device, sizes: Sizes) -> float:
    q, k, v = (_draw((sizes.batch, sizes.heads, sizes.tokens, HEAD_DIM), device) for _ in range(3))
    call = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
    (time_us,) = median_times_us([Timed([call], capturable=False)], device)
    return _tera(2 * sizes.batch * sizes.heads * sizes.tokens**2 * HEAD_DIM, time_us)


def _copy(device: torch.device, sizes: Sizes) -> float:
    nbytes = 2 * sizes.rows * HIDDEN
    sources = [_draw((sizes.rows, HIDDEN), device) for _ in range(sets_of_buffers(2 * nbytes, device))]
    copies = [torch.empty_like(source) for source in sources]
    calls = [partial(copy.copy_, source) for copy, source in zip(copies, sources, strict=True)]
    (time_us,) = median_times_us([Timed(calls)], device)
    return 2 * nbytes / time_us / 1e3


def _codec(codec: Codec, device: torch.device, sizes: Sizes, fmt: WireFormat) -> float:
    moved, spent_us = 0, 0.0
    for op in ("encode", "decode"):
        problem = Problem(op, fmt, sizes.rows, HIDDEN, torch.bfloat16)
        values_bytes = 2 * sizes.rows * HIDDEN
        count = sets_of_buffers(values_bytes, device)
        sources = [problem.source(_draw((sizes.rows, HIDDEN), device), codec) for _ in range(count)]
        outs = [problem.poisoned_output(device) for _ in sources]
        if writes_into_buffers(codec, problem, device):
            pairs = zip(sources, outs, strict=True)
            timed = Timed([call_into(codec, problem, source, out) for source, out in pairs])
        else:
            timed = Timed([partial(result_of, codec, problem, source) for source in sources], capturable=False)
        (time_us,) = median_times_us([timed], device)
        moved, spent_us = moved + sources[0].nbytes + outs[0].nbytes, spent_us + time_us
    return moved / spent_us / 1e3


def _draw(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(torch.bfloat16)


def _tera(operations: int, time_us: float) -> float:
    return operations / time_us / 1e6
