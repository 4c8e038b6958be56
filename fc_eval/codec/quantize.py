"""The arithmetic of one group, in fp32, each operation rounded on its own (WIRE.md, "Encode one group", "Decode").

    extremes_of -> metadata_of -> [ the wire ] -> scale_of -> quantize_ -> levels -> [ the wire ] -> dequantize_

`levels` are what the codes stand for before the scale is applied: 0..Q (asymmetric), -Q..Q, or minifloat values.
Groups are the last dimension of [T, G, m]; per-group arrays are [T, G, 1], ready to broadcast over a group.
"""

import functools
import struct
from typing import NamedTuple

import torch

from fc_eval.codec.base import DTYPES
from fc_eval.codec.canonical import fill_nan_
from fc_eval.codec.log_scale import grid, round_up
from fc_eval.codec.minifloat import round_to_grid_
from fc_eval.codec.power_of_two import shared_scale
from fc_eval.wire.format import WireFormat


class Metadata(NamedTuple):
    """What travels beside the codes, in fp32 [T, G, 1]: every value is exact in `metadata_dtype`.

    Attributes:
        first: lo, amax, the signed extreme e, or the scale (rounded, or a power of two); NaN marks a non-finite group.
        second: hi, the rounded lo or the integer zero point; None where the format has one value only.
    """

    first: torch.Tensor
    second: torch.Tensor | None


class Scale(NamedTuple):
    """What both sides derive from the metadata, fp32 [T, G, 1].

    Attributes:
        step: s of WIRE.md, NaN in non-finite groups.
        inverse: 1 / s, or 0 where that is of no use.
        low: the minimum that level 0 stands for; None where the format has none.
        zero: the integer zero point; None where the format has none.
    """

    step: torch.Tensor
    inverse: torch.Tensor
    low: torch.Tensor | None
    zero: torch.Tensor | None


def metadata_dtype(fmt: WireFormat, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the metadata of values in `dtype` are stored; uint8 for codes of a logarithmic scale."""
    if fmt.metadata == "log8":
        return torch.uint8
    return dtype if fmt.metadata == "extremes" else DTYPES[fmt.metadata]


def level_range(fmt: WireFormat) -> tuple[float, float]:
    """Smallest and largest level."""
    if fmt.minifloat is not None:
        return -fmt.minifloat.largest, fmt.minifloat.largest
    half = 2 ** (fmt.bits - 1)
    match fmt.scheme:
        case "asym":
            return 0, 2 * half - 1
        case "sym":
            return 1 - half, half - 1
        case _:
            return -half, half - 1


def code_bias(fmt: WireFormat) -> int:
    """What is added to an integer level to store it unsigned; 0 where there is no integer scheme."""
    return 2 ** (fmt.bits - 1) if fmt.scheme in ("sym", "se") else 0


@functools.lru_cache(maxsize=256)
def _scale_factor(fmt: WireFormat) -> float:
    """The fp32 constant that the extent of a group is multiplied by: 1 / Q, or -1 / 2^(b-1)."""
    factor = -(2.0 ** (1 - fmt.bits)) if fmt.scheme == "se" else 1 / level_range(fmt)[1]
    return float(struct.unpack("<f", struct.pack("<f", factor))[0])


def extremes_of(x: torch.Tensor, fmt: WireFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(lo, hi) of asymmetric groups, (e, None) of signed-extreme, (amax, None) of all others; NaN wins."""
    if fmt.scheme == "asym":
        return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if fmt.scheme == "se":
        first = x.abs().argmax(-1, keepdim=True)  # of equal magnitudes the first, and a NaN before all
        return x.gather(-1, first), None
    return torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_()), None


def metadata_of(lo: torch.Tensor, hi: torch.Tensor | None, fmt: WireFormat) -> Metadata:
    """Metadata of groups with the extremes of `extremes_of`; zeros are +0, non-finite groups NaN (zero point 0)."""
    extent = lo if hi is None else hi - lo
    broken = (extent.abs() < torch.inf).logical_not_()  # NaN is not below infinity either
    lo = lo + 0.0
    if fmt.kind == "mx":
        return Metadata(shared_scale(lo, fmt), None)
    if fmt.metadata == "extremes":
        return Metadata(fill_nan_(lo, broken), None if hi is None else fill_nan_(hi + 0.0, broken))
    step = _rounded_step(extent, fmt)
    if hi is None:
        return Metadata(fill_nan_(step, broken), None)
    if fmt.zero_bits:
        half = 2 ** (fmt.zero_bits - 1)
        zero = (-lo * _inverse(step)).round_().clamp_(-half, half - 1) + 0.0
        return Metadata(fill_nan_(step, broken), zero.masked_fill_(broken, 0.0))
    low = _saturated(lo, DTYPES[fmt.metadata]) + 0.0
    return Metadata(fill_nan_(step, broken), fill_nan_(low, broken))


def _rounded_step(extent: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
    if fmt.metadata == "log8":
        step = (extent * _scale_factor(fmt)).masked_fill_(extent == 0, 0.0)
        return round_up(torch.where((step == 0) & (extent != 0), grid()[1], step))
    dtype = DTYPES[fmt.metadata]
    step = _saturated(extent * _scale_factor(fmt), dtype)
    smallest = torch.full_like(extent, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    sign = -1.0 if fmt.scheme == "se" else 1.0
    step = torch.where((step == 0) & (extent != 0), smallest.copysign(extent * sign), step)
    return step + 0.0


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values rounded to `dtype` and back, the largest finite value instead of an overflow."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).float()


def _inverse(step: torch.Tensor) -> torch.Tensor:
    return step.reciprocal().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _sends_scale(fmt: WireFormat) -> bool:
    """Whether a scale travels instead of the extremes: then it may be too small for the largest element."""
    return fmt.metadata != "extremes" or fmt.kind == "mx"


def scale_of(meta: Metadata, fmt: WireFormat) -> Scale:
    """Scale and offset of the groups, from nothing but what travels."""
    if _sends_scale(fmt):
        step, low, zero = meta.first, meta.second, None
        if fmt.zero_bits:
            low, zero = None, meta.second
    elif meta.second is not None:
        step, low, zero = (meta.second - meta.first).mul_(_scale_factor(fmt)), meta.first, None
    else:
        step, low, zero = meta.first * _scale_factor(fmt), None, None
    return Scale(step, _inverse(step), low, zero)


def quantize_(x: torch.Tensor, scale: Scale, fmt: WireFormat) -> torch.Tensor:
    """Levels of fp32 groups [T, G, m], in place; anything in non-finite groups. The sign of a zero has no meaning."""
    if scale.low is not None:
        x.sub_(scale.low)
    x.mul_(scale.inverse)
    minifloat = fmt.minifloat
    if minifloat is not None:
        if _sends_scale(fmt):
            x.clamp_(-minifloat.largest, minifloat.largest)
        return round_to_grid_(x, minifloat)
    x.round_()
    if scale.zero is not None:
        x.add_(scale.zero)
    # Steps derived from the exact extremes keep every level in range, but for the positive end of signed-extreme.
    if fmt.metadata != "extremes" or fmt.scheme == "se":
        x.clamp_(*level_range(fmt))
    return x


def dequantize_(levels: torch.Tensor, scale: Scale, fmt: WireFormat) -> torch.Tensor:
    """fp32 values of levels [T, G, m], in place; NaN of any pattern in non-finite groups."""
    if scale.zero is not None:
        levels.sub_(scale.zero)
    levels.mul_(scale.step)
    if scale.low is not None:
        return levels.add_(scale.low)
    # + 0 makes the -0 of a zero level +0. Minifloat levels hold no -0; products that underflow keep their sign.
    return levels if fmt.minifloat is not None else levels.add_(0.0)
