"""Hierarchical all-reduce: two-step inside every node of n ranks, with an exchange between nodes in the middle.

    reduce-scatter in the node -> exchange and sum between ranks of the same index -> all-gather in the node

Three quantizations instead of two, and only 1 / n of the values crosses between nodes. A stage among one rank does
not exist: n = W is two-step, n = 1 is one-step.
"""

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.collective.comm import Comm
from fc_eval.collective.ordered_sum import sum_decoded


def hierarchical(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Partial sums [W, T, H] to values [T, H] in their dtype, and the non-finite groups of each stage, int64 [].

    `comm.node_size` divides W; the caller has made sure. Stages that do not exist are not in the list.
    """
    assert comm.reduce is not None
    assert comm.gather is not None
    assert comm.node_size is not None
    dtype, size = partials_WTH.dtype, comm.node_size
    counts: list[torch.Tensor] = []

    node_sums = list(partials_WTH)
    if size > 1:
        nodes = range(0, len(partials_WTH), size)
        reduced = [sum_decoded(partials_WTH[first : first + size], comm.reduce, codec) for first in nodes]
        node_sums = [node.values.to(dtype) for node in reduced]
        counts.append(torch.stack([node.nonfinite_groups for node in reduced]).sum())
    total = node_sums[0]
    if len(node_sums) > 1:
        exchanged = sum_decoded(node_sums, comm.reduce, codec)
        total = round_to_dtype(exchanged.values, dtype)
        counts.append(exchanged.nonfinite_groups)
    if size > 1:
        gathered = codec.round_trip(total, comm.gather)
        total = round_to_dtype(gathered.values, dtype)
        counts.append(gathered.nonfinite_groups)
    return total, counts
