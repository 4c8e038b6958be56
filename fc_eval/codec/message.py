"""Codes and metadata to the bytes of a message and back (WIRE.md, "Wire layout").

T tokens, G groups per row, g elements per padded group, NB blocks, E elements per block.
"""

from collections.abc import Iterator

import torch

from fc_eval.codec.bits import join_planes, split_planes
from fc_eval.codec.canonical import fill_nan_
from fc_eval.codec.groups import from_blocks, from_places, to_blocks, to_places
from fc_eval.codec.power_of_two import scale_codes, scales_of
from fc_eval.codec.quantize import Metadata, metadata_dtype
from fc_eval.wire.layout import Layout, plane_widths


def to_bytes(codes: torch.Tensor, meta: Metadata, shape: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Codes uint8 [T, G, g] and metadata of values in `dtype` to the bytes uint8 of the message."""
    wire = torch.zeros((shape.blocks, shape.block_bytes), dtype=torch.uint8, device=codes.device)
    for name, payload in _payloads(codes, meta, shape, dtype):
        section = shape.section(name)
        assert section is not None
        assert payload.shape[1] == section.payload_bytes
        wire[:, section.offset : section.offset + section.payload_bytes] = payload
    return wire.flatten()


def _payloads(
    codes: torch.Tensor, meta: Metadata, shape: Layout, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """(section, bytes [NB, n]) of everything that travels."""
    fmt = shape.format
    for width, plane in split_planes(to_places(to_blocks(codes, shape).flatten(1), shape), fmt.bits).items():
        yield f"plane{width}", plane
    if fmt.kind == "mx":
        scales = to_blocks(scale_codes(meta.first, fmt), shape).flatten(1)
        for width, plane in split_planes(scales, fmt.scale_bits).items():
            yield f"scale{width}", plane
        return
    for index, (array, stored) in enumerate(zip(meta, _metadata_dtypes(shape, dtype), strict=True)):
        if array is not None:
            yield f"meta{index}", _item_bytes(_as_stored(array, stored), shape)


def from_bytes(wire: torch.Tensor, shape: Layout, dtype: torch.dtype) -> tuple[torch.Tensor, Metadata]:
    """The inverse of `to_bytes`: codes uint8 [T, G, g], metadata in fp32 [T, G, 1]."""
    blocks, fmt = wire.reshape(shape.blocks, shape.block_bytes), shape.format
    places = _join(blocks, shape, "plane", fmt.bits, shape.block_elements)
    codes = from_blocks(from_places(places, shape).view(-1, shape.groups_per_block, shape.group), shape)
    if fmt.kind == "mx":
        scales = _join(blocks, shape, "scale", fmt.scale_bits, shape.groups_per_block)
        return codes, Metadata(scales_of(from_blocks(scales.unsqueeze(-1), shape), fmt), None)
    first, second = (
        _items(blocks, shape, f"meta{index}", stored) for index, stored in enumerate(_metadata_dtypes(shape, dtype))
    )
    assert first is not None
    return codes, Metadata(first.float(), None if second is None else second.float())


def _metadata_dtypes(shape: Layout, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    stored = metadata_dtype(shape.format, dtype)
    return stored, torch.int16 if shape.format.zero_point == "int16" else stored


def _as_stored(array: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """fp32 values that are exact in the dtype `stored`; every NaN canonical."""
    values = array.to(stored)
    return fill_nan_(values, array.isnan()) if values.is_floating_point() else values


def _item_bytes(per_group: torch.Tensor, shape: Layout) -> torch.Tensor:
    """[T, G, 1] of any dtype to bytes [NB, n]: one item for each group of a block."""
    return to_blocks(per_group, shape).view(torch.uint8).flatten(1)


def _section(blocks: torch.Tensor, shape: Layout, name: str) -> torch.Tensor | None:
    """Bytes [NB, n] of a section, None where the format has none."""
    found = shape.section(name)
    return None if found is None else blocks[:, found.offset : found.offset + found.payload_bytes]


def _items(blocks: torch.Tensor, shape: Layout, name: str, stored: torch.dtype) -> torch.Tensor | None:
    """The inverse of `_item_bytes`: [T, G, 1] of dtype `stored`."""
    payload = _section(blocks, shape, name)
    if payload is None:
        return None
    # A copy, because a section of odd length in front would leave the view of wider elements unaligned.
    items = payload.clone(memory_format=torch.contiguous_format).view(stored)
    return from_blocks(items.unsqueeze(-1), shape)


def _join(blocks: torch.Tensor, shape: Layout, prefix: str, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 [NB, count] from the planes of a section name."""
    found = {width: _section(blocks, shape, f"{prefix}{width}") for width in plane_widths(bits)}
    return join_planes({width: plane for width, plane in found.items() if plane is not None}, bits, count)
