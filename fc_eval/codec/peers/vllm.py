"""The INT8 all-reduce proposed for vLLM: one fp32 scale for 256 consecutive values, codes truncated toward zero.

Source: vllm-project/vllm pull request 39783 (open), read in 2026.

In fp32: 127 / amax travels; the code is x * (127 / amax) cast to int8, which drops the fraction; back: code / scale.
Groups run on over rows. Inferred: amax is at least 1e-12, as in the FlashInfer kernel of the same design; divisions are
taken as correctly rounded. A group with a NaN or an Inf, for which the source has no rule, comes back as NaN here.
"""

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.peers.table import PeerFormat

FLOOR = 1e-12


def round_trip(x_N: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """Values fp32 [N] of values fp32 [N], N a multiple of the group, and the non-finite groups."""
    groups = x_N.view(-1, group)
    amax = groups.abs().amax(1, keepdim=True).clamp_(min=FLOOR)
    scale = torch.full_like(amax, 2 ** (fmt.bits - 1) - 1) / amax
    finite = amax.isfinite()
    values = torch.where(finite, (groups * scale).trunc_() / scale, torch.nan)
    return RoundTrip(values.view(-1), finite.logical_not_().sum())
