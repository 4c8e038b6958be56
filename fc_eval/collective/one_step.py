"""One-step all-reduce (one-shot elsewhere): every rank sends its whole partial sum to every other rank, which sums.

One quantization and one synchronization less than two-step, W - 1 times the bytes. At W = 2 both move the same bytes.
"""

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.collective.comm import Comm
from fc_eval.collective.ordered_sum import sum_decoded


def one_step(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Partial sums [W, T, H] to values [T, H] in their dtype, and the non-finite groups of the one stage, int64 []."""
    assert comm.reduce is not None
    reduced = sum_decoded(partials_WTH, comm.reduce, codec)
    return round_to_dtype(reduced.values, partials_WTH.dtype), [reduced.nonfinite_groups]
