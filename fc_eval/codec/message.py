"""Codes, metadata and spikes to the bytes of a message and back (WIRE.md, "Wire layout").

T tokens, G groups per row, g elements per padded group, NB blocks, E elements per block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fc_eval.codec import log_scale
from fc_eval.codec.bits import join_planes, split_planes
from fc_eval.codec.canonical import fill_nan_
from fc_eval.codec.groups import from_blocks, from_places, to_blocks, to_places
from fc_eval.codec.power_of_two import scale_codes, scales_of
from fc_eval.codec.quantize import Metadata, metadata_dtype
from fc_eval.codec.spikes import Spikes
from fc_eval.wire.layout import Layout, plane_widths


class Contents(NamedTuple):
    """What a message holds: codes uint8 [T, G, g], metadata in fp32, and the spikes of a format that reserves them."""

    codes: torch.Tensor
    meta: Metadata
    spikes: Spikes | None


def to_bytes(contents: Contents, shape: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The bytes uint8 of a message of values in `dtype`."""
    wire = torch.zeros((shape.blocks, shape.block_bytes), dtype=torch.uint8, device=contents.codes.device)
    for name, payload in _payloads(contents, shape, dtype):
        section = shape.section(name)
        assert section is not None
        assert payload.shape[1] == section.payload_bytes
        wire[:, section.offset : section.offset + section.payload_bytes] = payload
    return wire.flatten()


def _payloads(contents: Contents, shape: Layout, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(section, bytes [NB, n]) of everything that travels."""
    codes, meta, spikes = contents
    fmt = shape.format
    for width, plane in split_planes(to_places(to_blocks(codes, shape).flatten(1), shape), fmt.bits).items():
        yield f"plane{width}", plane
    if fmt.kind == "mx":
        scales = to_blocks(scale_codes(meta.first, fmt), shape).flatten(1)
        for width, plane in split_planes(scales, fmt.scale_bits).items():
            yield f"scale{width}", plane
    else:
        for index, (array, stored) in enumerate(zip(meta, _metadata_dtypes(shape, dtype), strict=True)):
            if array is not None:
                yield f"meta{index}", _item_bytes(_as_stored(array, stored), shape)
    if spikes is not None:
        yield "spikes", _item_bytes(_as_stored(spikes.values, dtype), shape)
        yield "positions", _item_bytes(spikes.positions.to(_position_dtype(shape)), shape)


def from_bytes(wire: torch.Tensor, shape: Layout, dtype: torch.dtype) -> Contents:
    """The inverse of `to_bytes`."""
    blocks, fmt = wire.reshape(shape.blocks, shape.block_bytes), shape.format
    places = _join(blocks, shape, "plane", fmt.bits, shape.block_elements)
    codes = from_blocks(from_places(places, shape).view(-1, shape.groups_per_block, shape.group), shape)
    if fmt.kind == "mx":
        scales = _join(blocks, shape, "scale", fmt.scale_bits, shape.groups_per_block)
        meta = Metadata(scales_of(from_blocks(scales.unsqueeze(-1), shape), fmt), None)
    else:
        stored = enumerate(_metadata_dtypes(shape, dtype))
        first, second = (_items(blocks, shape, f"meta{index}", kind) for index, kind in stored)
        assert first is not None
        scale = log_scale.scales_of(first) if fmt.metadata == "log8" else first.float()
        meta = Metadata(scale, None if second is None else second.float())
    values = _items(blocks, shape, "spikes", dtype)
    positions = _items(blocks, shape, "positions", _position_dtype(shape))
    if values is None or positions is None:
        return Contents(codes, meta, None)
    return Contents(codes, meta, Spikes(values.float(), positions.long() & 0xFFFF))


def _metadata_dtypes(shape: Layout, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    stored = metadata_dtype(shape.format, dtype)
    return stored, {0: stored, 8: torch.int8, 16: torch.int16}[shape.format.zero_bits]


def _position_dtype(shape: Layout) -> torch.dtype:
    """uint8, or uint16 under the name of the signed type that every operation knows."""
    return torch.uint8 if shape.position_bytes == 1 else torch.int16


def _as_stored(array: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """fp32 values that are exact in the dtype `stored`, every NaN canonical; or the codes of a logarithmic scale."""
    if stored == torch.uint8:
        return log_scale.codes_of(array)
    values = array.to(stored)
    return fill_nan_(values, array.isnan()) if values.is_floating_point() else values


def _item_bytes(per_group: torch.Tensor, shape: Layout) -> torch.Tensor:
    """[T, G, k] of any dtype to bytes [NB, n]: the first item of all groups of a block, then the second."""
    return to_blocks(per_group, shape).transpose(1, 2).flatten(1).contiguous().view(torch.uint8)


def _section(blocks: torch.Tensor, shape: Layout, name: str) -> torch.Tensor | None:
    """Bytes [NB, n] of a section, None where the format has none."""
    found = shape.section(name)
    return None if found is None else blocks[:, found.offset : found.offset + found.payload_bytes]


def _items(blocks: torch.Tensor, shape: Layout, name: str, stored: torch.dtype) -> torch.Tensor | None:
    """The inverse of `_item_bytes`: [T, G, k] of dtype `stored`, None where the format has no such section."""
    payload = _section(blocks, shape, name)
    if payload is None:
        return None
    # A copy, because a section of odd length in front would leave the view of wider elements unaligned.
    items = payload.clone(memory_format=torch.contiguous_format).view(stored)
    per_group = items.shape[1] // shape.groups_per_block
    return from_blocks(items.view(shape.blocks, per_group, shape.groups_per_block).transpose(1, 2), shape)


def _join(blocks: torch.Tensor, shape: Layout, prefix: str, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 [NB, count] from the planes of a section name."""
    found = {width: _section(blocks, shape, f"{prefix}{width}") for width in plane_widths(bits)}
    return join_planes({width: plane for width, plane in found.items() if plane is not None}, bits, count)
