"""ZeRO++ (DeepSpeed): symmetric INT8 and INT4 with one fp32 scale for a very large group.

Source: microsoft/DeepSpeed, csrc/includes/quantization_utils.h and deepspeed/runtime/comm/coalesced_collectives.py
(all_to_all_quant_reduce, arXiv 2306.10209), read in 2026.

A message [T, H] has as many groups as its longer side, of consecutive values. scale = 2^b / (2 amax) in fp32, 1 for a
group of zeros; code = clamp(rint(x * scale), -2^(b-1), 2^(b-1) - 1), so that the largest positive value is one step
short; back: code * (1 / scale), rounded to fp16, the dtype of the values. Inferred: a group with a NaN or an Inf, for
which the source has no rule, comes back as NaN here.
"""

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.peers.table import PeerFormat


def round_trip(x_N: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """Values fp16 [N] of values fp16 [N], N a multiple of the group, and the non-finite groups."""
    half = 2 ** (fmt.bits - 1)
    groups = x_N.float().view(-1, group)
    amax = groups.abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, torch.full_like(amax, 2**fmt.bits) / (2 * amax))
    finite = amax.isfinite()
    levels = (groups * scale).round_().clamp_(-half, half - 1)
    values = torch.where(finite, levels * scale.reciprocal(), torch.nan)
    return RoundTrip(values.half().view(-1), finite.logical_not_().sum())
