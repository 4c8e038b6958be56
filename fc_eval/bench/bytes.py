"""Bytes first: every codec's results against those of another implementation, before and after it is timed."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fc_eval.bench.operations import Problem, call_into, result_of, writes_into_buffers
from fc_eval.codec.base import Codec
from fc_eval.errors import FcEvalError

# Whole groups and blocks, then rows that end in a short group and a message that ends in a padded block.
SMALL_SHAPES = ((48, 4096), (19, 1000))


def awkward_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values [..., H] of many magnitudes; some rows hold NaN, Inf, zeros, one value, subnormals or the largest values.

    Drawn on the CPU, the same for the same arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = math.prod(shape[:-1])
    x = torch.randn(rows, shape[-1], generator=generator)
    x = torch.ldexp(x, torch.randint(-8, 9, (rows, 1), generator=generator))
    info = torch.finfo(dtype)
    for row, fill in enumerate((math.nan, math.inf, -math.inf)):
        x[row::17, 5 :: shape[-1] // 3] = fill
    x[3::17] = 0.0
    x[4::17] = -1.5
    x[5::17] *= info.smallest_normal
    x[6::17] = (torch.rand(shape[-1], generator=generator) - 0.5) * info.max
    x[7::17, ::64] *= 1000.0
    return x.to(dtype).view(shape)


def check_small(
    codecs: Sequence[Codec], oracle: Codec, problem: Problem, device: torch.device, where: str = "small values"
) -> dict[str, int]:
    """Compares each codec's result for `problem` on small awkward inputs with the oracle's, byte for byte.

    Args:
        codecs: those that will be timed.
        oracle: the implementation that they are compared with, on the CPU.
        problem: its operation, format, dtype and ranks count; its size does not.
        device: where the codecs work.
        where: for the message.

    Returns:
        {codec name: bytes compared}.

    Raises:
        FcEvalError: a result differs.
    """
    compared = dict.fromkeys((codec.name for codec in codecs), 0)
    for seed, (tokens, hidden) in enumerate(SMALL_SHAPES):
        small = replace(problem, tokens=tokens, hidden=hidden)
        source = small.source(awkward_values(small.values_shape, small.dtype, seed), oracle)
        expected = result_of(oracle, small, source)
        for codec in codecs:
            there = source.to(device)
            if writes_into_buffers(codec, small, device):
                found = small.poisoned_output(device)
                call_into(codec, small, there, found)()
                same_bytes(result_of(codec, small, there), expected, codec, small, where)
            else:
                found = result_of(codec, small, there)
            compared[codec.name] += same_bytes(found, expected, codec, small, where)
    return compared


def same_bytes(found: torch.Tensor, expected: torch.Tensor, codec: Codec, problem: Problem, where: str) -> int:
    """How many bytes were compared.

    Raises:
        FcEvalError: they are not the same.
    """
    found_bytes, expected_bytes = (t.contiguous().view(-1).view(torch.uint8) for t in (found, expected))
    if found_bytes.shape != expected_bytes.shape:
        raise FcEvalError(
            f"codec {codec.name} gave {found_bytes.numel()} bytes for {problem.name} of {problem.fmt} ({where}), "
            f"expected {expected_bytes.numel()}: do not use it, and build the native code again"
        )
    differs = found_bytes != expected_bytes.to(found_bytes.device)
    if differs.any():
        raise FcEvalError(
            f"codec {codec.name} differs in {int(differs.sum())} of {differs.numel()} bytes for {problem.name} of "
            f"{problem.fmt} ({where}, the first at {int(differs.nonzero()[0])}): nothing was timed that could be "
            "reported; do not use it, and build the native code again"
        )
    return found_bytes.numel()
