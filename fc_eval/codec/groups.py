"""Rows to groups and back: where the short last group of a row, padding and the lane order of a block are dealt with.

T tokens, H hidden, G groups per row, g elements per padded group, E elements per block, NB blocks.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from fc_eval.wire.layout import Layout


def row_parts(x_TH: torch.Tensor, group: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Views of the groups of every row, none of them padded: all full groups, then the short last one.

    Yields:
        (columns of a [T, G] array of groups, view [T, n, m] of `x_TH`); m = `group`, or less for the short group.
    """
    tokens, hidden = x_TH.shape
    full = hidden // group
    if full:
        yield slice(0, full), x_TH[:, : full * group].view(tokens, full, group)
    if hidden % group:
        yield slice(full, full + 1), x_TH[:, full * group :].unsqueeze(1)


def to_blocks(per_group: torch.Tensor, shape: Layout) -> torch.Tensor:
    """[T, G, ...] to [NB, groups per block, ...]: groups numbered over rows, the last block filled with zeros."""
    flat = per_group.flatten(0, 1)
    missing = shape.blocks * shape.groups_per_block - flat.shape[0]
    flat = pad(flat, [0, 0] * (flat.dim() - 1) + [0, missing])
    return flat.view(shape.blocks, shape.groups_per_block, *flat.shape[1:])


def from_blocks(per_block: torch.Tensor, shape: Layout) -> torch.Tensor:
    """The inverse of `to_blocks`, the padding dropped."""
    flat = per_block.flatten(0, 1)[: shape.groups]
    return flat.view(shape.tokens, shape.groups_per_row, *flat.shape[1:])


def to_places(codes_NE: torch.Tensor, shape: Layout) -> torch.Tensor:
    """Codes [NB, E] in element order to the order in which they stand on the wire (WIRE.md, "Wire layout")."""
    if not shape.permuted:
        return codes_NE
    # Element 256 i + 8 L + j (load i, lane L) stands at place 32 L + 8 i + j.
    return codes_NE.view(-1, 4, 32, 8).transpose(1, 2).flatten(1)


def from_places(codes_NE: torch.Tensor, shape: Layout) -> torch.Tensor:
    """The inverse of `to_places`."""
    if not shape.permuted:
        return codes_NE
    return codes_NE.view(-1, 32, 4, 8).transpose(1, 2).flatten(1)
