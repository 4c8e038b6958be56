"""FlashInfer's quantized all-reduce: FP8 E4M3 with one fp32 scale for 256 consecutive values.

Source: flashinfer-ai/flashinfer, flashinfer/comm/quantized_allreduce.py (pull request 3759), read in 2026.

In fp32: amax, at least 1e-12; amax / 448 travels; codes are clamp(x * (448 / amax), -448, 448) rounded to nearest even;
back: code * (amax / 448). Groups run on over rows. Inferred: divisions are taken as correctly rounded. A group with a
NaN or an Inf, for which the source has no rule, comes back as NaN here.
"""

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.minifloat import round_to_grid_
from fc_eval.codec.peers.table import PeerFormat
from fc_eval.wire.format import MINIFLOATS

E4M3 = MINIFLOATS["e4m3"]
FLOOR = 1e-12


def round_trip(x_N: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """Values fp32 [N] of values fp32 [N], N a multiple of the group, and the non-finite groups."""
    groups = x_N.view(-1, group)
    amax = groups.abs().amax(1, keepdim=True).clamp_(min=FLOOR)
    largest = torch.full_like(amax, E4M3.largest)
    scaled = (groups * (largest / amax)).clamp_(-E4M3.largest, E4M3.largest)
    finite = amax.isfinite()
    values = torch.where(finite, round_to_grid_(scaled, E4M3) * (amax / largest), torch.nan)
    return RoundTrip(values.view(-1), finite.logical_not_().sum())
