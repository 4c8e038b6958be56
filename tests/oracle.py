"""WIRE.md once more: scalar, slow, written from that page alone. No tensor library and nothing of `fc_eval` but names.

A tensor is a list of rows of `numpy.float32` scalars, whose arithmetic rounds every operation once. `fmt` is read for
its fields only (kind, bits, group_size, scheme, element, metadata, zero_point); all sizes are worked out here.
"""

import math
import struct

import numpy as np
from oracle_floats import (
    NAN,
    ONE,
    SMALL_FLOATS,
    WIDTH,
    ZERO,
    finite,
    from_bits,
    plus_zero,
    saturated,
    small_code,
    small_value,
    to_bits,
)

Rows = list[list[np.float32]]


# One group ------------------------------------------------------------------------------------------------------------


def q_of(fmt) -> float:
    if fmt.element:
        return SMALL_FLOATS[fmt.element][3]
    return 2**fmt.bits - 1 if fmt.scheme == "asym" else 2 ** (fmt.bits - 1) - 1


def scale_of(fmt, extent: np.float32) -> np.float32:
    """s of a group whose hi - lo, amax or signed extreme is `extent`."""
    if fmt.scheme == "se":
        return extent * np.float32(-1 / 2 ** (fmt.bits - 1))
    return extent * (ONE / np.float32(q_of(fmt)))


def rounded_scale(fmt, extent: np.float32) -> np.float32:
    s = scale_of(fmt, extent)
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
    broken = [NAN, 0] if fmt.zero_point == "int16" else [NAN] * count
    if not all(finite(v) for v in x):
        return broken, [0] * len(x)

    if fmt.scheme == "asym":
        lo, hi = plus_zero(min(x)), plus_zero(max(x))
        if not finite(hi - lo):
            return broken, [0] * len(x)
        if extremes:
            s, meta = scale_of(fmt, hi - lo), [lo, hi]
        elif fmt.zero_point == "int16":
            s = rounded_scale(fmt, hi - lo)
            z = clamp(rint(-lo * inverse_of(s)), -(2**15), 2**15 - 1)
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
    if math.isnan(meta[0]):
        return [NAN] * len(codes)
    if fmt.scheme == "asym":
        if fmt.zero_point == "int16":
            return [np.float32(q - int(meta[1])) * meta[0] for q in codes]
        s, lo = (scale_of(fmt, meta[1] - meta[0]), meta[0]) if fmt.metadata == "extremes" else meta
        return [np.float32(q) * s + lo for q in codes]
    s = scale_of(fmt, meta[0]) if fmt.metadata == "extremes" else meta[0]
    if fmt.element:
        return [np.float32(small_value(q, fmt.element)) * s for q in codes]
    bias = 2 ** (fmt.bits - 1)
    return [ZERO if q == bias else np.float32(q - bias) * s for q in codes]


# Messages -------------------------------------------------------------------------------------------------------------


def plane_widths(bits: int) -> list[int]:
    return {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]


def geometry(fmt, tokens: int, hidden: int) -> tuple[int, int, int, int]:
    """Elements of a padded group, groups of a row, groups of a block, blocks."""
    if fmt.group_size == "token":
        g, per_row, per_block = (hidden + 127) // 128 * 128, 1, 1
    else:
        g = fmt.group_size
        per_row, per_block = math.ceil(hidden / g), max(1, 1024 // g)
    return g, per_row, per_block, math.ceil(tokens * per_row / per_block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def metadata_dtypes(fmt, dtype: str) -> list[str]:
    kind = dtype if fmt.metadata == "extremes" else fmt.metadata
    if fmt.scheme != "asym":
        return [kind]
    return [kind, "int16" if fmt.zero_point == "int16" else kind]


def metadata_bytes(value, kind: str) -> bytes:
    if kind == "int16":
        return struct.pack("<h", int(value))
    return to_bits(value, kind).to_bytes(WIDTH[kind], "little")


def metadata_value(data: bytes, kind: str):
    if kind == "int16":
        return struct.unpack("<h", data)[0]
    return from_bits(int.from_bytes(data, "little"), kind)


def place(element: int, block_elements: int) -> int:
    if block_elements != 1024:
        return element
    load, lane, j = element // 256, element % 256 // 8, element % 8
    return 32 * lane + 8 * load + j


def encode(x: Rows, fmt, dtype: str) -> bytes:
    tokens, hidden = len(x), len(x[0]) if x else 1
    g, per_row, per_block, blocks = geometry(fmt, tokens, hidden)
    with np.errstate(all="ignore"):
        groups = [encode_group(row[i * g : (i + 1) * g], fmt) for row in x for i in range(per_row)]
    kinds, message = metadata_dtypes(fmt, dtype), b""
    for block in range(blocks):
        members = groups[block * per_block : (block + 1) * per_block]
        places = [0] * (g * per_block)
        for index, (_, codes) in enumerate(members):
            for offset, code in enumerate(codes):
                places[place(index * g + offset, g * per_block)] = code
        shift = 0
        for width in plane_widths(fmt.bits):
            plane = 0
            for p, code in enumerate(places):
                plane |= ((code >> shift) & (2**width - 1)) << (width * p)
            message += padded(plane.to_bytes(math.ceil(len(places) * width / 8), "little"))
            shift += width
        for which, kind in enumerate(kinds):
            size = 2 if kind == "int16" else WIDTH[kind]
            data = b"".join(metadata_bytes(meta[which], kind) for meta, _ in members)
            message += padded(data + bytes(size * (per_block - len(members))))
    return message


def decode(message: bytes, fmt, tokens: int, hidden: int, dtype: str) -> tuple[Rows, int]:
    """fp32 values, and the number of non-finite groups."""
    g, per_row, per_block, blocks = geometry(fmt, tokens, hidden)
    kinds, cursor, groups = metadata_dtypes(fmt, dtype), 0, []
    for _ in range(blocks):
        elements, shift = g * per_block, 0
        places = [0] * elements
        for width in plane_widths(fmt.bits):
            size = math.ceil(elements * width / 8)
            plane = int.from_bytes(message[cursor : cursor + size], "little")
            for p in range(elements):
                places[p] |= ((plane >> (width * p)) & (2**width - 1)) << shift
            cursor, shift = cursor + len(padded(bytes(size))), shift + width
        metas: list[list] = [[] for _ in range(per_block)]
        for kind in kinds:
            size = 2 if kind == "int16" else WIDTH[kind]
            for index in range(per_block):
                start = cursor + index * size
                metas[index].append(metadata_value(message[start : start + size], kind))
            cursor += len(padded(bytes(size * per_block)))
        for index in range(per_block):
            codes = [places[place(index * g + offset, elements)] for offset in range(g)]
            groups.append((metas[index], codes))
    assert cursor == len(message)
    rows, broken = [], 0
    with np.errstate(all="ignore"):
        for token in range(tokens):
            row: list[np.float32] = []
            for meta, codes in groups[token * per_row : (token + 1) * per_row]:
                row += decode_group(meta, codes[: min(g, hidden - len(row))], fmt)
                broken += math.isnan(meta[0])
            rows.append(row)
    return rows, broken


def round_trip(x: Rows, fmt, dtype: str) -> tuple[Rows, int]:
    return decode(encode(x, fmt, dtype), fmt, len(x), len(x[0]) if x else 1, dtype)
