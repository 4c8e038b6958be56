"""Block-diagonal Hadamard rotation of rows (WIRE.md, "Hadamard"; an ablation of Flash Communication, 2412.04964).

The matrix is symmetric and its own inverse, so one function rotates there and back. T tokens, H hidden.
"""

import struct
from dataclasses import replace

import torch

from fc_eval.codec.canonical import round_to_dtype
from fc_eval.wire.format import WireFormat


def rotate(x_TH: torch.Tensor) -> torch.Tensor:
    """fp32 rows times the normalized matrix in Sylvester order, of the largest power of two that divides H."""
    tokens, hidden = x_TH.shape
    block = hidden & -hidden
    stride = 1
    while stride < block:
        first, second = x_TH.reshape(tokens, hidden // (2 * stride), 2, stride).unbind(2)
        x_TH = torch.stack([first + second, first - second], dim=2)
        stride *= 2
    factor = 2.0 ** (-(block.bit_length() - 1) / 2)
    return x_TH.reshape(tokens, hidden) * float(struct.unpack("<f", struct.pack("<f", factor))[0])


def rotated(x_TH: torch.Tensor) -> torch.Tensor:
    """What a format that rotates encodes: values in bf16, fp16 or fp32, rotated and rounded to their dtype."""
    return round_to_dtype(rotate(x_TH.detach().float()), x_TH.dtype)


def in_rotated_space(fmt: WireFormat) -> WireFormat:
    """The same format for values that are rotated already."""
    return replace(fmt, hadamard=False)
