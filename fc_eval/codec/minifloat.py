"""Small floats: rounding to the grid of a type, and its codes. Any type of `wire.MINIFLOATS`; no Inf, no NaN.

A code is sign, exponent, mantissa from the high bit down; exponent field 0 holds the subnormals.
"""

import functools

import torch

from fc_eval.wire.format import Minifloat


@functools.lru_cache(maxsize=32)
def magnitudes(kind: Minifloat) -> tuple[float, ...]:
    """The values of the codes with sign 0 in rising order, up to the largest finite one; all exact in fp32.

    >>> magnitudes(Minifloat(2, 1, 1, 2, 6.0))
    (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """
    values = []
    for code in range(1 << (kind.exponent + kind.mantissa)):
        field, fraction = code >> kind.mantissa, code & ((1 << kind.mantissa) - 1)
        significand = fraction if field == 0 else fraction + (1 << kind.mantissa)
        values.append(significand * 2.0 ** (max(field, 1) - kind.bias - kind.mantissa))
    return tuple(value for value in values if value <= kind.largest)


def round_to_grid_(x: torch.Tensor, kind: Minifloat) -> torch.Tensor:
    """Rounds fp32 `x` in place to the nearest value of the type, ties to the even code, a zero always to +0.

    `x` must be below twice the largest value in magnitude; the caller saturates. NaN stays NaN.
    """
    # The power of two at or below |x|, from the exponent bits alone (Inf for NaN), at least the smallest normal.
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0 ** (1 - kind.bias))
    if kind.mantissa == 0:
        return _round_to_powers_(x, binade, kind)
    # 1.5 * 2^23 grid steps: a sum of that size has the step as its last bit, so the addition rounds to the grid.
    shift = binade.mul_(1.5 * 2.0 ** (23 - kind.mantissa))
    return x.add_(shift).sub_(shift)


def _round_to_powers_(x: torch.Tensor, binade: torch.Tensor, kind: Minifloat) -> torch.Tensor:
    """The grid 0, 2^k: without mantissa bits the even code is the one with an even exponent field."""
    odd_field = ((binade.view(torch.int32) >> 23) - 127 + kind.bias) % 2 == 1
    ratio = x.abs() / binade
    up = (ratio > 1.5) | ((ratio == 1.5) & odd_field)
    nonzero = ratio > 0.5
    grid = torch.where(nonzero, torch.where(up, binade * 2, binade), 0.0).copysign(x)
    return x.copy_(torch.where(x.isnan(), x, grid + 0.0))


def codes_of(grid: torch.Tensor, kind: Minifloat) -> torch.Tensor:
    """Codes uint8 of finite fp32 values that lie on the grid already."""
    table = torch.tensor(magnitudes(kind), dtype=torch.float32, device=grid.device)
    code = torch.bucketize(grid.abs(), table)
    return (code + ((grid < 0).long() << (kind.bits - 1))).to(torch.uint8)


def values_of(codes: torch.Tensor, kind: Minifloat) -> torch.Tensor:
    """fp32 values of uint8 codes; a code that the encoder never writes (Inf, NaN of the type) reads as the largest."""
    table = torch.tensor(magnitudes(kind), dtype=torch.float32, device=codes.device)
    sign_bit = 1 << (kind.bits - 1)
    magnitude = table[(codes & (sign_bit - 1)).long().clamp_(max=len(table) - 1)]
    return torch.where(codes >= sign_bit, -magnitude, magnitude)
