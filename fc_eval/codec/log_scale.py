"""Scales of one byte on a logarithmic grid (WIRE.md, "Eight-bit metadata"). Scales are fp32; NaN is a non-finite group.

Code 0 is the scale 0, code c of 1 to 254 is fp32(2^((c - 161) / 8)), code 255 is NaN.
"""

import functools
import struct

import torch

STEPS_PER_OCTAVE, ORIGIN, NAN_CODE = 8, 161, 255


@functools.cache
def grid() -> tuple[float, ...]:
    """The scales of the codes 0 to 254, rising."""
    powers = [2.0 ** ((code - ORIGIN) / STEPS_PER_OCTAVE) for code in range(1, NAN_CODE)]
    return 0.0, *struct.unpack(f"<{len(powers)}f", struct.pack(f"<{len(powers)}f", *powers))


def round_up(scale: torch.Tensor) -> torch.Tensor:
    """The smallest grid scale that is not below; the largest one where none is. NaN may become any."""
    table = _table(scale.device)
    return table[torch.bucketize(scale, table).clamp_(max=len(table) - 1)]


def codes_of(scale: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of scales that lie on the grid."""
    return torch.bucketize(scale, _table(scale.device)).masked_fill_(scale.isnan(), NAN_CODE).to(torch.uint8)


def scales_of(codes: torch.Tensor) -> torch.Tensor:
    """The scales of uint8 codes."""
    return torch.cat([_table(codes.device), torch.full((1,), torch.nan, device=codes.device)])[codes.long()]


def _table(device: torch.device) -> torch.Tensor:
    return torch.tensor(grid(), dtype=torch.float32, device=device)
