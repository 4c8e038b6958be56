"""QuickReduce Q8, Q6, Q4 and INT3: groups of 32, a signed scale, everything in fp16.

Source: mk1-project/quickreduce (csrc/core/allreduce.h) and its copies in vLLM (csrc/quickreduce; pull requests 19744
and, for INT3, 45666) and SGLang, read in 2026.

A group is the even or the odd elements of 64 consecutive ones. Its extreme e is the largest element if that is larger
in magnitude than the smallest, otherwise the smallest. In fp16, each operation rounded: s = e * (-1 / 2^(b-1)) travels,
inv = 1 / (s + 2^-24), code = rint(clamp(x * inv, -2^(b-1), 2^(b-1) - 1)) with the bias 2^(b-1), back: code * s.

Inferred: the hardware's reciprocal is taken as correctly rounded, and saturates at 65504, because groups with a small
extreme (below about 0.002 in Q8) are reported to shrink (SGLang issue 40084). Values that overflow elsewhere (the cast
of bf16 to fp16, sums) are Inf, as reported in SGLang issue 34473; a group with one comes back as NaN here.
"""

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.peers.table import PeerFormat

LARGEST = 65504.0
SMALLEST = 2.0**-24


def round_trip(x_N: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """Values fp16 [N] of values fp16 [N], N a multiple of 64, and the non-finite groups."""
    half = 2 ** (fmt.bits - 1)
    pairs = x_N.view(-1, group, 2)
    high, low = pairs.amax(1, keepdim=True), pairs.amin(1, keepdim=True)
    extreme = torch.where(high.abs() > low.abs(), high, low)
    scale = extreme * (-1 / half)
    # A reciprocal of fp16 has too few bits for fp32 to spoil the second rounding.
    inverse = (scale + SMALLEST).float().reciprocal().clamp_(-LARGEST, LARGEST).half()
    levels = (pairs * inverse).clamp_(-half, half - 1).round_()
    finite = extreme.isfinite()
    values = torch.where(finite, levels * scale, torch.nan)
    return RoundTrip(values.view(-1), finite.logical_not_().sum())
