"""The one generator of cases for codecs and collectives: formats x dtypes x shapes x distributions, all seeded.

Every implementation (reference, native, oracle) is fed from here. A case prints as its id, which says all of it.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fc_eval.codec.base import DTYPES
from fc_eval.wire.format import FORMATS as TABLE
from fc_eval.wire.format import WireFormat, parse_format

# Every width in every scheme, then every metadata kind, then group sizes around the special ones.
INTEGER_FORMATS = [f"int{bits}-g32-{scheme}" for bits in range(2, 9) for scheme in ("asym", "sym", "se")]
SCALE_FORMATS = [
    f"int{bits}-g32-{scheme}-{scale}"
    for bits, scale in ((4, "sbf16"), (4, "sfp16"), (8, "sfp32"), (2, "sfp16"))
    for scheme in ("asym", "sym", "se", "asym-zint16")
]
GROUP_FORMATS = [
    *("int4-g8", "int5-g9-se", "int3-g100-sym", "int8-g128", "int6-g128-sym", "int4-g200", "int7-g256-se"),
    *("int2-g1000", "int4-g1024", "int3-g4096", "int5-gtoken", "int8-gtoken-sym", "int3-gtoken-sfp16"),
]
FLOAT_FORMATS = [
    base + suffix
    for base in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1")
    for suffix in ("-g32", "-g100-sfp16", "-gtoken-sbf16")
]
MX_FORMATS = [name for name, row in TABLE.items() if row.kind == "mx"]
MX_FORMATS += ["mxfp4-g128", "mxfp6_e2m3-g100", "mxfp8_e4m3-gtoken"]
MX_FORMATS += ["mxint4-g16-e4m0", "mxfp4-e5m0", "mxfp5_e2m2-g8-e6m0", "mxint3-g9-e7m0"]  # scales packed by planes
SPIKE_FORMATS = [
    *("int2-g32-sr", "int3-g64-sr", "int4-g128-sym-sr", "int5-g9-se-sr", "int8-g8-sr", "int2-gtoken-sr"),
    *("int3-g1024-sr", "int6-g300-se-sr", "int4-g4096-sym-sr"),
    *("fp4_e2m1-g32-sr", "mxfp4-sr", "mxint8-g100-e5m0-sr"),
    *("int4-sfp16-sr", "int4-g8-sfp16-zint16-sr", "int3-g32-se-sbf16-sr", "fp8_e4m3-g9-sfp32-sr"),
]
NARROW_FLOATS = ("fp5_e3m1", "fp5_e2m2", "fp4_e3m0", "fp4_e1m2", "fp3_e2m0", "fp3_e1m1")
NARROW_FORMATS = [base + suffix for base in NARROW_FLOATS for suffix in ("-g32", "-g100-sfp16-sr")]
ROTATED_FORMATS = [
    *("int4-g32-had", "int8-gtoken-had", "int3-g100-sym-had", "int2-g64-sr-had", "int4-g32-sfp16-zint16-had"),
    *("fp6_e3m2-g9-had", "mxfp4-had", "mxint4-g16-e4m0-had"),
]
LOG_FORMATS = [
    *("int2-g32-slog8-sr", "int4-g32-slog8", "int3-g64-sym-slog8-sr", "int8-g100-slog8", "int5-gtoken-slog8"),
    *("fp4_e2m1-g32-slog8", "int2-g8-slog8-had"),
]
# New formats go to the end: the golden vectors of the others are not to move.
FORMATS = INTEGER_FORMATS + SCALE_FORMATS + GROUP_FORMATS + FLOAT_FORMATS + MX_FORMATS + SPIKE_FORMATS
FORMATS += NARROW_FORMATS + ROTATED_FORMATS + LOG_FORMATS

# T, H: one element; a short group; a row shorter than a block; a whole block; several blocks with a ragged end.
SHAPES = [(1, 1), (3, 20), (2, 130), (1, 1024), (5, 300)]

Fill = Callable[[torch.Generator, int, int, torch.dtype], torch.Tensor]


def _normal(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=gen)


def _one_outlier(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(tokens, hidden, generator=gen)
    x[:, hidden // 2] *= 1000
    return x


def _constant(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, 1, generator=gen).expand(tokens, hidden).clone()


def _signed_zeros(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs; in every other row a few values that are not zero."""
    x = torch.zeros(tokens, hidden).copysign(torch.randn(tokens, hidden, generator=gen))
    x[::2, ::7] = torch.randn(x[::2, ::7].shape, generator=gen)
    return x


def _ties(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of a quarter step beside extremes that make the step a power of two in some width."""
    x = torch.randint(-32, 33, (tokens, hidden), generator=gen) / 4
    x[:, 0] = torch.tensor([7.0, 8.0, 15.0, -8.0, 3.0])[torch.randint(5, (tokens,), generator=gen)]
    return x


def _subnormal(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Around the smallest normal number of the dtype, so that scales, inverses or the values are subnormal."""
    exponents = torch.randint(-12, 8, (tokens, 1), generator=gen)
    return torch.ldexp(torch.randn(tokens, hidden, generator=gen) * torch.finfo(dtype).smallest_normal, exponents)


def _top(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Up to the largest finite value, of both signs in some rows only: `hi - lo` overflows in those."""
    x = torch.rand(tokens, hidden, generator=gen, dtype=torch.float64)
    x[1::2] = x[1::2] * 2 - 1
    return (x * torch.finfo(dtype).max).float()


def _wide(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes over the whole range of exponents in one group."""
    low, high = (-20, 14) if dtype == torch.float16 else (-120, 120)
    return torch.ldexp(
        torch.randn(tokens, hidden, generator=gen), torch.randint(low, high, (tokens, hidden), generator=gen)
    )


def _nonfinite(gen: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN of both signs and Inf at a few places; the other groups are sound."""
    x = torch.randn(tokens, hidden, generator=gen)
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"), -float("nan"))):
        if row < tokens:
            x[row, (37 * row + 5) % hidden] = value
    return x


DISTRIBUTIONS: dict[str, Fill] = {
    "normal": _normal,
    "one_outlier": _one_outlier,
    "constant": _constant,
    "signed_zeros": _signed_zeros,
    "ties": _ties,
    "subnormal": _subnormal,
    "top": _top,
    "wide": _wide,
    "nonfinite": _nonfinite,
}


@dataclass(frozen=True)
class Case:
    """Values [tokens, hidden] of one distribution, to be sent in one format."""

    format_name: str
    dtype_name: str
    tokens: int
    hidden: int
    distribution: str

    @property
    def fmt(self) -> WireFormat:
        return parse_format(self.format_name)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def __str__(self) -> str:
        return f"{self.format_name} {self.dtype_name} {self.tokens}x{self.hidden} {self.distribution}"

    def values(self) -> torch.Tensor:
        """[T, H] in the dtype of the case, the same at every call."""
        return self.partials(1)[0]

    def partials(self, world_size: int) -> torch.Tensor:
        """[W, T, H]: partial sums of W ranks, each drawn on its own."""
        gen = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        fill = DISTRIBUTIONS[self.distribution]
        return torch.stack([fill(gen, self.tokens, self.hidden, self.dtype) for _ in range(world_size)]).to(self.dtype)


def codec_cases(format_names: list[str], shapes: list[tuple[int, int]] = SHAPES) -> list[Case]:
    """Every format, dtype and distribution, each in a shape that changes from one to the next."""
    combinations = [(f, d, x) for f in format_names for d in DTYPES for x in DISTRIBUTIONS]
    # 5 shapes and 27 combinations per format have no common divisor, so a format meets every shape.
    return [Case(f, d, *shapes[i % len(shapes)], x) for i, (f, d, x) in enumerate(combinations)]


def order_sensitive(world_size: int, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """[W, T, H] constant rows 2^24, 1, -2^24, 1, ... on different ranks: another order gives another fp32 sum.

    Constant groups travel exactly in `asym`, so the order of the sum is all that can change the result.
    fp16 cannot hold 2^24; there the row is 2^11, 1, -2^11 and the order shows only where sums are rounded on the way.
    """
    big = 2.0**11 if dtype == torch.float16 else 2.0**24
    pattern = torch.tensor([big, 1.0, -big, 1.0, 0.5, big, -big, 1.0])[:world_size]
    return pattern[:, None, None].expand(world_size, tokens, hidden).to(dtype).clone()


# (comm, W): every algorithm, unequal formats and group sizes, a W that does not divide the blocks.
COMMS = [
    ("plain", 3),
    ("fp32_ordered", 3),
    ("int4-g32", 2),
    ("int4-g32/int8-g100-sym", 3),
    ("fp8_e4m3-g32/int3-gtoken-se", 4),
    ("int8-sfp16", 8),
    ("one_step:int6-g32", 3),
    ("one_step:fp4_e2m1-g9", 2),
    ("ring:int4-g32", 4),
    ("ring:int5-g8/int8-g8-sym", 3),
    ("ring:int8-gtoken", 2),
    ("hierarchical@2:int4-g32", 4),
    ("hierarchical@3:int6-g9-se/int8-g32", 6),
    ("hierarchical@2:int4-g32/int8", 2),
    ("hierarchical@1:int4-g32/int8", 3),
    ("mxfp4/mxfp8_e4m3", 3),
    ("one_step:mxint4-g16-e4m0", 2),
    ("ring:mxfp6_e2m3", 3),
    ("int2-g64-sr/int4-g32-sr", 3),
    ("ring:int3-g32-sr", 3),
    ("int4-g32-had/int8-g100-sym-had", 3),
    ("one_step:int5-g32-had", 4),
    ("hierarchical@2:int4-gtoken-had/int6-g32", 4),
]
