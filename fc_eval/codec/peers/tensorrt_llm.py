"""TensorRT-LLM's low-precision all-reduce: FP8 E4M3 in lines of 512 bytes, 496 values and one fp32 scale.

Source: NVIDIA/TensorRT-LLM, cpp/tensorrt_llm/kernels/communicationKernels/customLowPrecisionAllReduceKernels.cu, read
in 2026 (pull request 4344).

In fp32: 448 / amax travels, 0 for a line of zeros, which then is sent as it is; codes are x * (448 / amax) rounded to
nearest even, saturated; back: code / scale. Lines run on over rows; what is missing in the last one is zero.
Inferred: divisions are taken as correctly rounded. A line with a NaN or an Inf, or with an amax so small that 448 /
amax overflows, for which the source has no rule, comes back as NaN here.
"""

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.minifloat import round_to_grid_
from fc_eval.codec.peers.table import PeerFormat
from fc_eval.wire.format import MINIFLOATS

E4M3 = MINIFLOATS["e4m3"]


def round_trip(x_N: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """Values fp32 [N] of values fp32 [N], N a multiple of the group, and the non-finite groups."""
    groups = x_N.view(-1, group)
    amax = groups.abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, torch.full_like(amax, E4M3.largest) / amax)
    finite = amax.isfinite() & scale.isfinite()
    scaled = (groups * scale).clamp_(-E4M3.largest, E4M3.largest)
    values = torch.where(finite, round_to_grid_(scaled, E4M3) / scale, torch.nan)
    return RoundTrip(values.view(-1), finite.logical_not_().sum())
