"""TopK: the values of largest magnitude travel with their positions, all others are zero.

Source: the older compression that arXiv 2411.09510 compares with, after arXiv 2301.02654 (Does compressing activations
help model parallel training?). Its details are not known here, so all of this is inferred: the values of a token are
one pool; of equal magnitudes the first ones are taken; values travel in fp16 and a position in ceil(log2 H) bits. A
token with a NaN or an Inf, or with a value beyond fp16, comes back as NaN.
"""

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.peers.table import PeerFormat


def round_trip(x_N: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """Values fp32 [N] of values fp32 [N], N a multiple of the group, and the non-finite tokens."""
    rows = x_N.view(-1, group)
    sent = rows.half().float()
    # Sorted, because `topk` chooses among equal values as it likes.
    kept = rows.abs().argsort(dim=1, descending=True, stable=True)[:, : fmt.kept(group)]
    values = torch.zeros_like(rows).scatter_(1, kept, sent.gather(1, kept))
    finite = sent.isfinite().all(1, keepdim=True)
    return RoundTrip(torch.where(finite, values, torch.nan).view(-1), finite.logical_not_().sum())
