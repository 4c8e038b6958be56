"""One group of WIRE.md, "Encode one group" and "Decode": scalar, slow, written from that page alone.

A group is a list of `numpy.float32` scalars, whose arithmetic rounds every operation once. `fmt` is read for its fields
only (kind, bits, scheme, element, metadata, zero_point, scale_bits, spikes).
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from oracle_floats import (
    EMAX,
    NAN,
    ONE,
    SMALL_FLOATS,
    ZERO,
    finite,
    from_bits,
    plus_zero,
    read_code,
    saturated,
    small_code,
)


class Group(NamedTuple):
    """What travels of one group: metadata (of mx: one scale code), a code per element, the spikes where there are any.

    `spikes` are the smallest and the largest value, then their positions.
    """

    meta: list
    codes: list[int]
    spikes: list


def is_broken(meta: list, fmt) -> bool:
    """Whether the metadata are those of a non-finite group."""
    return meta[0] == 2**fmt.scale_bits - 1 if fmt.kind == "mx" else math.isnan(meta[0])


def encode_spiked(x: list[np.float32], fmt) -> Group:
    """Rule 6 around the others."""
    if not fmt.spikes:
        return Group(*encode_group(x, fmt), [])
    if not all(finite(v) for v in x):
        return Group(*encode_group(x, fmt), [NAN, NAN, 0, 0])
    low = x.index(min(x))
    others = [i for i in range(len(x)) if i != low] or [low]
    high = next(i for i in others if x[i] == max(x[j] for j in others))
    rest = [i for i in others if i != high]
    meta, codes = encode_group([x[i] for i in rest] or [ZERO], fmt)
    if is_broken(meta, fmt):
        return Group(meta, [0] * len(x), [NAN, NAN, 0, 0])
    by_place = dict(zip(rest, codes, strict=False))
    spikes = [plus_zero(x[low]), plus_zero(x[high]), low, high]
    return Group(meta, [by_place.get(i, 0) for i in range(len(x))], spikes)


def decode_spiked(group: Group, fmt) -> list[np.float32]:
    values = decode_group(group.meta, group.codes, fmt)
    if group.spikes and not is_broken(group.meta, fmt):
        for value, position in zip(group.spikes[:2], group.spikes[2:], strict=True):
            if position < len(values):  # other positions are never written; nothing outside the group is touched
                values[position] = value
    return values


def encode_mx(x: list[np.float32], fmt) -> tuple[list, list[int]]:
    top = 2 ** (fmt.scale_bits - 1) - 1
    amax = max(abs(v) for v in x)
    if amax == 0:
        return [0], [0] * len(x)
    floor_log2 = math.frexp(float(amax))[1] - 1  # a double holds every fp32 number as a normal one
    exponent = clamp(floor_log2 - EMAX[fmt.element], -top, top)
    scaled = [np.float32(math.ldexp(float(v), -exponent)) for v in x]
    return [exponent + top], [small_code(v, fmt.element) for v in scaled]


def decode_mx(scale_code: int, codes: list[int], fmt) -> list[np.float32]:
    scale = 2.0 ** (scale_code - (2 ** (fmt.scale_bits - 1) - 1))
    return [np.float32(read_code(q, fmt.element) * scale) for q in codes]


def q_of(fmt) -> float:
    if fmt.element:
        return SMALL_FLOATS[fmt.element][3]
    return 2**fmt.bits - 1 if fmt.scheme == "asym" else 2 ** (fmt.bits - 1) - 1


def scale_of(fmt, extent: np.float32) -> np.float32:
    """s of a group whose hi - lo, amax or signed extreme is `extent`."""
    if fmt.scheme == "se":
        return extent * np.float32(-1 / 2 ** (fmt.bits - 1))
    return extent * (ONE / np.float32(q_of(fmt)))


@functools.cache
def log_grid() -> list[np.float32]:
    """The scales of the codes 0 to 254."""
    return [ZERO] + [np.float32(2 ** ((code - 161) / 8)) for code in range(1, 255)]


def zero_type(fmt) -> str | None:
    """The integer type of the zero point, None where there is none."""
    if fmt.scheme == "asym" and fmt.metadata == "log8":
        return "int8"
    return "int16" if fmt.zero_point == "int16" else None


def rounded_scale(fmt, extent: np.float32) -> np.float32:
    s = scale_of(fmt, extent)
    if fmt.metadata == "log8":
        return next((g for g in log_grid()[1:] if g >= s), log_grid()[254]) if extent else ZERO
    stored = saturated(s, fmt.metadata)
    if stored == 0 and extent != 0:
        stored = from_bits(1, fmt.metadata)
        if (extent < 0) != (fmt.scheme == "se"):
            stored = -stored
    return plus_zero(stored)


def inverse_of(s: np.float32) -> np.float32:
    if s == 0:
        return ZERO
    inverse = ONE / s
    return inverse if finite(inverse) else ZERO


def rint(x: np.float32) -> int:
    """Half to even; an infinity is as good as any number far out of range."""
    return round(float(x)) if finite(x) else (2**40 if x > 0 else -(2**40))


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def encode_group(x: list[np.float32], fmt) -> tuple[list, list[int]]:
    """The metadata values that travel (None for a zero point of a non-finite group), and the codes."""
    b, extremes = fmt.bits, fmt.metadata == "extremes"
    count = 2 if fmt.scheme == "asym" else 1
    broken = [NAN, 0] if zero_type(fmt) else [NAN] * count
    if fmt.kind == "mx":
        broken = [2**fmt.scale_bits - 1]
    if not all(finite(v) for v in x):
        return broken, [0] * len(x)
    if fmt.kind == "mx":
        return encode_mx(x, fmt)

    if fmt.scheme == "asym":
        lo, hi = plus_zero(min(x)), plus_zero(max(x))
        if not finite(hi - lo):
            return broken, [0] * len(x)
        if extremes:
            s, meta = scale_of(fmt, hi - lo), [lo, hi]
        elif zero_type(fmt):
            s = rounded_scale(fmt, hi - lo)
            half = 2**7 if zero_type(fmt) == "int8" else 2**15
            z = clamp(rint(-lo * inverse_of(s)), -half, half - 1)
            inverse = inverse_of(s)
            return [s, z], [clamp(rint(v * inverse) + z, 0, 2**b - 1) for v in x]
        else:
            s = rounded_scale(fmt, hi - lo)
            lo = plus_zero(saturated(lo, fmt.metadata))
            meta = [s, lo]
        inverse = inverse_of(s)
        return meta, [clamp(rint((v - lo) * inverse), 0, 2**b - 1) for v in x]

    if fmt.scheme == "se":
        largest = max(abs(v) for v in x)
        extreme = plus_zero(next(v for v in x if abs(v) == largest))
    else:
        extreme = plus_zero(max(abs(v) for v in x))
    s = scale_of(fmt, extreme) if extremes else rounded_scale(fmt, extreme)
    inverse, meta = inverse_of(s), [extreme if extremes else s]
    if fmt.element:
        return meta, [small_code(v * inverse, fmt.element) for v in x]
    half = 2 ** (b - 1)
    low = -half if fmt.scheme == "se" else 1 - half
    return meta, [clamp(rint(v * inverse), low, half - 1) + half for v in x]


def decode_group(meta: list, codes: list[int], fmt) -> list[np.float32]:
    if is_broken(meta, fmt):
        return [NAN] * len(codes)
    if fmt.kind == "mx":
        return decode_mx(meta[0], codes, fmt)
    if fmt.scheme == "asym":
        if zero_type(fmt):
            return [np.float32(q - int(meta[1])) * meta[0] for q in codes]
        s, lo = (scale_of(fmt, meta[1] - meta[0]), meta[0]) if fmt.metadata == "extremes" else meta
        return [np.float32(q) * s + lo for q in codes]
    s = scale_of(fmt, meta[0]) if fmt.metadata == "extremes" else meta[0]
    if fmt.element:
        return [np.float32(read_code(q, fmt.element)) * s for q in codes]
    bias = 2 ** (fmt.bits - 1)
    return [plus_zero(np.float32(q - bias) * s) for q in codes]
