"""A part of a message: the bytes of a run of blocks, and the values that they stand for.

A codec knows whole messages. A run of blocks is part of the message of a few rows, which begin where a block begins:
`Window` says which rows these are, and where in their own message the run lies. T tokens, H hidden, R rows.
"""

import math
from dataclasses import dataclass

import torch

from fc_eval.codec.base import DTYPE_NAMES, Codec
from fc_eval.wire.format import WireFormat
from fc_eval.wire.layout import Layout, layout


@dataclass(frozen=True)
class Window:
    """The rows that hold a run of blocks.

    Attributes:
        whole: layout of the whole message.
        blocks: the run, numbered as in the whole message.
        rows: the rows of the whole message, the first of which begins a block.
        first: the first block of the run in the message of these rows alone.
    """

    whole: Layout
    blocks: range
    rows: range
    first: int

    @classmethod
    def around(cls, whole: Layout, blocks: range) -> "Window":
        """The rows around a run of blocks; none for an empty run."""
        if not blocks:
            return cls(whole, blocks, range(0), 0)
        per_row, per_block = whole.groups_per_row, whole.groups_per_block
        period = per_block // math.gcd(per_row, per_block)  # every so many rows begin a block
        start = blocks.start * per_block // per_row // period * period
        last_group = min(blocks.stop * per_block, whole.groups) - 1
        rows = range(start, last_group // per_row + 1)
        return cls(whole, blocks, rows, blocks.start - start * per_row // per_block)

    @property
    def byte_slice(self) -> slice:
        """Where the run lies in the message of the window's rows."""
        return slice(self.first * self.whole.block_bytes, (self.first + len(self.blocks)) * self.whole.block_bytes)

    def flat(self, elements: range) -> slice:
        """A run of flat elements of the whole message as a slice of the window's flattened values."""
        start = self.rows.start * self.whole.hidden
        return slice(elements.start - start, elements.stop - start)

    def encode(self, values: torch.Tensor, elements: range, codec: Codec) -> torch.Tensor:
        """Bytes of the run; `values` [n] are all its real elements, or more of them, at the flat places `elements`."""
        rows_RH = values.new_zeros((len(self.rows), self.whole.hidden))
        rows_RH.view(-1)[self.flat(elements)] = values
        return codec.encode(rows_RH, self.whole.format)[self.byte_slice]

    def decode(self, wire: torch.Tensor, dtype: torch.dtype, codec: Codec) -> torch.Tensor:
        """Values [R, H] fp32 of the bytes of the run; what lies outside of it is not meaningful, but finite."""
        shape = len(self.rows), self.whole.hidden
        message = layout(self.whole.format, *shape, DTYPE_NAMES[dtype])
        if wire.numel() != message.total_bytes:
            run, wire = wire, wire.new_zeros(message.total_bytes)
            wire[self.byte_slice] = run
        return codec.decode(wire, self.whole.format, shape, dtype).values


def block_bytes(wire: torch.Tensor, whole: Layout, blocks: range) -> torch.Tensor:
    """The bytes of a run of blocks of a whole message, as a view."""
    return wire[blocks.start * whole.block_bytes : blocks.stop * whole.block_bytes]


def broken_groups(values_RH: torch.Tensor, first_row: int, whole: Layout, elements: range) -> torch.Tensor:
    """How many groups that begin among some flat elements are non-finite: int64 [], on the device.

    A group belongs to whoever owns its first element. Decoding gives NaN for a whole non-finite group and never for
    another one, so the first element of a group tells.
    """
    starts = values_RH[:, :: whole.group].isnan().flatten()
    before = first_row * whole.groups_per_row
    return starts[_group_from(whole, elements.start) - before : _group_from(whole, elements.stop) - before].sum()


def _group_from(whole: Layout, element: int) -> int:
    """The first group that begins at or after a flat element."""
    row, column = divmod(element, whole.hidden)
    return row * whole.groups_per_row + -(-column // whole.group)


def message_layout(fmt: WireFormat, shape: torch.Size, dtype: torch.dtype) -> Layout:
    """The layout of the message of values [T, H]."""
    return layout(fmt, shape[0], shape[1], DTYPE_NAMES[dtype])
