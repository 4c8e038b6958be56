"""Where every byte of a message lies, derived from a `WireFormat` (WIRE.md, "Wire layout"). Pure integers.

A message is a sequence of equal blocks; a block holds whole groups, planes of code bits first, metadata after:

    +-- code planes (8, 4, 2, 1 bits) --+-- first metadata --+-- second --+-- spike values --+-- positions --+
    each section padded with zeros to 16 bytes; a block of `groups_per_block * padded group size` elements

T tokens (rows), H hidden (columns), W ranks.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from fc_eval.errors import FcEvalError
from fc_eval.wire.format import WireFormat

SECTION_ALIGN = 16
BLOCK_ELEMENTS = 1024
TOKEN_ALIGN = 128
MAX_SPIKE_GROUP = 2**16
# Blocks of this many elements use the lane order of WIRE.md; all others are in plain order.
PERMUTED_BLOCK = 1024
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Section:
    """One run of bytes in a block: `name`, `offset` from the block's start, and `nbytes` with its padding."""

    name: str
    offset: int
    nbytes: int
    payload_bytes: int


@dataclass(frozen=True)
class Layout:
    """Sizes of a message of `format` for `tokens x hidden` values of one dtype.

    Attributes:
        group: elements of a padded group (H rounded up to 128 for one group per token).
        groups_per_row: groups in a row; the last may hold fewer real elements.
        groups_per_block: whole groups in a block.
        blocks: blocks in the message (NB of WIRE.md).
        sections: byte ranges inside one block, in order.
        block_bytes: bytes of one block.
    """

    format: WireFormat
    tokens: int
    hidden: int
    group: int
    groups_per_row: int
    groups_per_block: int
    blocks: int
    sections: tuple[Section, ...]
    block_bytes: int

    @property
    def block_elements(self) -> int:
        """Elements of one block, padding included."""
        return self.group * self.groups_per_block

    @property
    def groups(self) -> int:
        """Real groups of the message (blocks may end in groups that are all padding)."""
        return self.tokens * self.groups_per_row

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole message; 0 for no tokens."""
        return self.blocks * self.block_bytes

    @property
    def position_bytes(self) -> int:
        """Bytes of one spike position."""
        return position_bytes(self.group)

    @property
    def permuted(self) -> bool:
        """Whether elements stand in the lane order of a 1024-element block."""
        return self.block_elements == PERMUTED_BLOCK

    def section(self, name: str) -> Section | None:
        """The section of that name ('plane4', 'meta0', ...), None where the format has none."""
        return next((s for s in self.sections if s.name == name), None)


def plane_widths(bits: int) -> tuple[int, ...]:
    """Bit splitting (arXiv 2508.03760): the widths of the code planes of a b-bit code, low code bits first.

    >>> plane_widths(7)
    (4, 2, 1)
    """
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def metadata_bytes(fmt: WireFormat, dtype: str) -> tuple[int, ...]:
    """Bytes per group of the first and second metadata, or of the only one, for values of `dtype`."""
    if fmt.kind == "mx":
        raise FcEvalError(f"format {fmt.name!r} has packed scales: use its layout")
    width = 1 if fmt.metadata == "log8" else DTYPE_BYTES[dtype if fmt.metadata == "extremes" else fmt.metadata]
    if fmt.scheme != "asym":
        return (width,)
    return (width, fmt.zero_bits // 8 or width)


def position_bytes(group: int) -> int:
    """Bytes of one spike position in a group of so many elements."""
    return 1 if group <= 256 else 2


def _section_sizes(fmt: WireFormat, dtype: str, elements: int, groups: int, group: int) -> Iterator[tuple[str, int]]:
    for width in plane_widths(fmt.bits):
        yield f"plane{width}", -(-elements * width // 8)
    if fmt.kind == "mx":
        for width in plane_widths(fmt.scale_bits):
            yield f"scale{width}", -(-groups * width // 8)
    else:
        for index, nbytes in enumerate(metadata_bytes(fmt, dtype)):
            yield f"meta{index}", nbytes * groups
    if fmt.spikes:
        yield "spikes", 2 * DTYPE_BYTES[dtype] * groups
        yield "positions", 2 * position_bytes(group) * groups


@functools.lru_cache(maxsize=4096)
def layout(fmt: WireFormat, tokens: int, hidden: int, dtype: str) -> Layout:
    """The byte layout of one message; cached, since every call of a codec asks for it.

    Args:
        fmt: the wire format.
        tokens: T, rows; 0 gives an empty message.
        hidden: H, columns, at least 1.
        dtype: 'bf16', 'fp16' or 'fp32', that of the values.

    Raises:
        FcEvalError: a negative or empty shape, or another dtype.
    """
    if tokens < 0 or hidden < 1:
        raise FcEvalError(f"a message of {tokens} x {hidden} values is not possible: expected T >= 0 and H >= 1")
    if dtype not in DTYPE_BYTES:
        raise FcEvalError(f"dtype {dtype!r} is not supported: expected {', '.join(DTYPE_BYTES)}")
    if fmt.spikes and fmt.group_size == "token" and hidden > MAX_SPIKE_GROUP:
        raise FcEvalError(
            f"a row of {hidden} values is too long for {fmt.name}, whose spike positions have 16 bits: "
            f"expected at most {MAX_SPIKE_GROUP}, or a group size in elements"
        )
    if fmt.group_size == "token":
        group, groups_per_row, groups_per_block = -(-hidden // TOKEN_ALIGN) * TOKEN_ALIGN, 1, 1
    else:
        group = fmt.group_size
        groups_per_row, groups_per_block = -(-hidden // group), max(1, BLOCK_ELEMENTS // group)
    sections, offset = [], 0
    for name, payload in _section_sizes(fmt, dtype, group * groups_per_block, groups_per_block, group):
        nbytes = -(-payload // SECTION_ALIGN) * SECTION_ALIGN
        sections.append(Section(name, offset, nbytes, payload))
        offset += nbytes
    blocks = -(-tokens * groups_per_row // groups_per_block)
    return Layout(fmt, tokens, hidden, group, groups_per_row, groups_per_block, blocks, tuple(sections), offset)


def effective_bits(fmt: WireFormat, tokens: int, hidden: int, dtype: str) -> float:
    """Bits per value of one encoded message, metadata and all padding counted: 8 * bytes / (T * H)."""
    return 8 * layout(fmt, tokens, hidden, dtype).total_bytes / (tokens * hidden)


def nominal_bits(fmt: WireFormat, dtype: str, hidden: int = 4096) -> float:
    """The limit of `effective_bits` for large aligned shapes (INT4 g128 in bf16: 4.25).

    `hidden` matters for one group per token only, whose cost per value depends on the row's length.
    """
    shape = layout(fmt, 1, hidden, dtype)
    return 8 * shape.block_bytes / shape.block_elements


def owned_blocks(blocks: int, rank: int, world_size: int) -> range:
    """The blocks that `rank` owns, possibly none: [r * NB // W, (r + 1) * NB // W)."""
    return range(rank * blocks // world_size, (rank + 1) * blocks // world_size)
