"""Channel-wise integers: one symmetric scale for a channel of a message, over all of its tokens.

Source: the older compression that arXiv 2411.09510 compares with, after arXiv 2301.02654 (Does compressing activations
help model parallel training?). Its details are not known here, so all of this is inferred: scale = amax / 7 for 4 bits,
in fp32, rounded to fp16, in which it travels; codes are x / scale rounded to nearest even, at most 7 in magnitude;
back: code * scale. A channel with a NaN or an Inf, or with a scale beyond fp16, comes back as NaN.
"""

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.peers.table import PeerFormat


def round_trip(x_N: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """Values fp32 [N] of values fp32 [N] = [T, H] in rows, T the group, and the non-finite channels."""
    largest = 2 ** (fmt.bits - 1) - 1
    x_TH = x_N.view(group, -1)
    scale_H = (x_TH.abs().amax(0) / largest).half().float()
    finite_H = scale_H.isfinite()
    codes_TH = (x_TH / torch.where(scale_H == 0, 1.0, scale_H)).round_().clamp_(-largest, largest)
    values_TH = torch.where(finite_H, codes_TH * scale_H, torch.nan)
    return RoundTrip(values_TH.view(-1), finite_H.logical_not_().sum())
