"""Bit splitting: b-bit codes to planes of 8, 4, 2 and 1 bits and back (FlashCommunication V2, arXiv 2508.03760).

A plane of k bits holds the code of place p in its bits k p .. k p + k - 1, low bits of a byte first.
"""

import torch
from torch.nn.functional import pad

from fc_eval.wire.layout import plane_widths


def split_planes(codes_NE: torch.Tensor, bits: int) -> dict[int, torch.Tensor]:
    """Codes uint8 [N, E] below 2^bits to {plane width: uint8 [N, ceil(E * width / 8)]}, low code bits first."""
    planes, shift = {}, 0
    for width in plane_widths(bits):
        planes[width] = _pack((codes_NE >> shift) & ((1 << width) - 1), width)
        shift += width
    return planes


def join_planes(planes: dict[int, torch.Tensor], bits: int, elements: int) -> torch.Tensor:
    """The inverse of `split_planes`: codes uint8 [N, elements]."""
    codes, shift = None, 0
    for width in plane_widths(bits):
        part = _unpack(planes[width], width)[:, :elements] << shift
        codes = part if codes is None else codes | part
        shift += width
    assert codes is not None
    return codes


def _pack(values_NE: torch.Tensor, width: int) -> torch.Tensor:
    per_byte = 8 // width
    values_NE = pad(values_NE, (0, -values_NE.shape[1] % per_byte))
    lanes = values_NE.view(len(values_NE), values_NE.shape[1] // per_byte, per_byte)
    packed = torch.zeros_like(lanes[..., 0])
    for lane in range(per_byte):
        packed |= lanes[..., lane] << (lane * width)
    return packed


def _unpack(packed_NB: torch.Tensor, width: int) -> torch.Tensor:
    mask = (1 << width) - 1
    return torch.stack([(packed_NB >> shift) & mask for shift in range(0, 8, width)], dim=-1).flatten(1)
