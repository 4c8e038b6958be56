"""WIRE.md once more: scalar, slow, written from that page alone. No tensor library and nothing of `fc_eval` but names.

A tensor is a list of rows of `numpy.float32` scalars. `fmt` is read for its fields only; all sizes are worked out here.
"""

import math
import struct

import numpy as np
from oracle_floats import NAN, WIDTH, from_bits, rounded, to_bits
from oracle_group import Group, decode_spiked, encode_spiked, is_broken, log_grid, zero_type

Rows = list[list[np.float32]]


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


def items(fmt, dtype: str, g: int) -> list[tuple[str, int]]:
    """(kind, items per group) of the sections behind the planes, of mx behind the scale codes."""
    kind = dtype if fmt.metadata == "extremes" else fmt.metadata  # "log8" is a byte
    kinds = [] if fmt.kind == "mx" else [(kind, 1)]
    if fmt.scheme == "asym":
        kinds.append((zero_type(fmt) or kind, 1))
    if fmt.spikes:
        kinds += [(dtype, 2), ("uint8" if g <= 256 else "uint16", 2)]
    return kinds


INTEGERS = {"int8": "<b", "int16": "<h", "uint8": "<B", "uint16": "<H"}


def item_bytes(value, kind: str) -> bytes:
    if kind in INTEGERS:
        return struct.pack(INTEGERS[kind], int(value))
    if kind == "log8":
        return bytes([255 if math.isnan(value) else log_grid().index(value)])
    return to_bits(value, kind).to_bytes(WIDTH[kind], "little")


def item_value(data: bytes, kind: str):
    if kind in INTEGERS:
        return struct.unpack(INTEGERS[kind], data)[0]
    if kind == "log8":
        return NAN if data[0] == 255 else log_grid()[data[0]]
    return from_bits(int.from_bytes(data, "little"), kind)


def item_size(kind: str) -> int:
    return struct.calcsize(INTEGERS[kind]) if kind in INTEGERS else 1 if kind == "log8" else WIDTH[kind]


def place(element: int, block_elements: int) -> int:
    if block_elements != 1024:
        return element
    load, lane, j = element // 256, element % 256 // 8, element % 8
    return 32 * lane + 8 * load + j


def plane_bytes(codes: list[int], bits: int) -> bytes:
    """All planes of some codes."""
    data, shift = b"", 0
    for width in plane_widths(bits):
        plane = 0
        for p, code in enumerate(codes):
            plane |= ((code >> shift) & (2**width - 1)) << (width * p)
        data += padded(plane.to_bytes(math.ceil(len(codes) * width / 8), "little"))
        shift += width
    return data


class Reader:
    """Takes a message apart from front to back."""

    def __init__(self, message: bytes):
        self.message, self.cursor = message, 0

    def take(self, size: int) -> bytes:
        start = self.cursor
        self.cursor += len(padded(bytes(size)))
        return self.message[start : start + size]

    def codes(self, count: int, bits: int) -> list[int]:
        codes, shift = [0] * count, 0
        for width in plane_widths(bits):
            plane = int.from_bytes(self.take(math.ceil(count * width / 8)), "little")
            for p in range(count):
                codes[p] |= ((plane >> (width * p)) & (2**width - 1)) << shift
            shift += width
        return codes

    def items(self, count: int, kind: str) -> list:
        size = item_size(kind)
        data = self.take(size * count)
        return [item_value(data[i * size : (i + 1) * size], kind) for i in range(count)]


def rotate(x: Rows) -> Rows:
    """Rule 7, row by row; the same way there and back."""
    return [rotate_row(row) for row in x]


def rotate_row(row: list[np.float32]) -> list[np.float32]:
    size = next(2**k for k in range(len(row).bit_length(), -1, -1) if len(row) % 2**k == 0)
    values, stride = list(row), 1
    with np.errstate(all="ignore"):
        while stride < size:
            for i in range(len(row)):
                if not i // stride % 2:
                    a, b = values[i], values[i + stride]
                    values[i], values[i + stride] = a + b, a - b
            stride *= 2
        return [v * np.float32(2 ** (-math.log2(size) / 2)) for v in values]


def encode(x: Rows, fmt, dtype: str) -> bytes:
    if fmt.hadamard:
        x = [[rounded(v, dtype) for v in row] for row in rotate(x)]
    tokens, hidden = len(x), len(x[0]) if x else 1
    g, per_row, per_block, blocks = geometry(fmt, tokens, hidden)
    with np.errstate(all="ignore"):
        groups = [encode_spiked(row[i * g : (i + 1) * g], fmt) for row in x for i in range(per_row)]
    message = b""
    for block in range(blocks):
        members = groups[block * per_block : (block + 1) * per_block]
        missing = per_block - len(members)
        places = [0] * (g * per_block)
        for index, group in enumerate(members):
            for offset, code in enumerate(group.codes):
                places[place(index * g + offset, g * per_block)] = code
        message += plane_bytes(places, fmt.bits)
        if fmt.kind == "mx":
            message += plane_bytes([group.meta[0] for group in members] + [0] * missing, fmt.scale_bits)
        # Every group's items in the order of the sections: metadata, then spike values, then positions.
        columns = list(zip(*(([] if fmt.kind == "mx" else m.meta) + m.spikes for m in members), strict=True))
        for kind, per_group in items(fmt, dtype, g):
            data = b""
            for _ in range(per_group):
                data += b"".join(item_bytes(v, kind) for v in columns.pop(0)) + bytes(item_size(kind) * missing)
            message += padded(data)
    return message


def decode(message: bytes, fmt, tokens: int, hidden: int, dtype: str) -> tuple[Rows, int]:
    """fp32 values, and the number of non-finite groups."""
    g, per_row, per_block, blocks = geometry(fmt, tokens, hidden)
    reader, groups = Reader(message), []
    for _ in range(blocks):
        places = reader.codes(g * per_block, fmt.bits)
        columns = [reader.codes(per_block, fmt.scale_bits)] if fmt.kind == "mx" else []
        for kind, per_group in items(fmt, dtype, g):
            found = reader.items(per_group * per_block, kind)
            columns += [found[i * per_block : (i + 1) * per_block] for i in range(per_group)]
        metas = len(columns) - (4 if fmt.spikes else 0)
        for index in range(per_block):
            codes = [places[place(index * g + offset, g * per_block)] for offset in range(g)]
            values = [column[index] for column in columns]
            groups.append(Group(values[:metas], codes, values[metas:]))
    assert reader.cursor == len(message)
    rows, broken = [], 0
    with np.errstate(all="ignore"):
        for token in range(tokens):
            row: list[np.float32] = []
            for group in groups[token * per_row : (token + 1) * per_row]:
                row += decode_spiked(group._replace(codes=group.codes[: min(g, hidden - len(row))]), fmt)
                broken += is_broken(group.meta, fmt)
            rows.append(row)
    return (rotate(rows) if fmt.hadamard else rows), broken


def round_trip(x: Rows, fmt, dtype: str) -> tuple[Rows, int]:
    return decode(encode(x, fmt, dtype), fmt, len(x), len(x[0]) if x else 1, dtype)
