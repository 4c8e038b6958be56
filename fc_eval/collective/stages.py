"""The stages of an all-reduce one by one: what travels in each, and what the layer gets when it quantizes alone.

Flash Communication (arXiv 2412.04964, Fig. 5) compares quantization before the reduce-scatter with that before the
all-gather. An algorithm has such stages where every rank sends its own partial sum; a ring sends running sums, and
nodes send sums of nodes, so that no stage of theirs can be measured apart from the ones before it.
"""

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.collective.comm import Comm
from fc_eval.collective.ordered_sum import sum_decoded
from fc_eval.collective.unquantized import fp32_ordered

STAGES: dict[str, tuple[str, ...]] = {
    "two_step": ("reduce", "gather"),
    "one_step": ("reduce",),
    "fp32_ordered": (),
    "plain": (),
}


def can_be_staged(comm: Comm) -> bool:
    """Whether what each stage of this comm does can be told from what the others do."""
    return comm.algorithm in STAGES


def reduce_with_one_stage(partials_WTH: torch.Tensor, comm: Comm, codec: Codec, stage: str) -> torch.Tensor:
    """What the layer gets when only one stage quantizes, and the other sends values in their dtype.

    Args:
        partials_WTH: [W, T, H] in bf16, fp16 or fp32.
        comm: one that `can_be_staged`.
        codec: covers its formats.
        stage: 'reduce' or 'gather'; one that the comm lacks leaves everything unquantized.

    Returns:
        [T, H] in the dtype of the partial sums.
    """
    dtype, stages = partials_WTH.dtype, STAGES[comm.algorithm]
    if stage == "reduce" and stage in stages:
        assert comm.reduce is not None
        return round_to_dtype(sum_decoded(partials_WTH, comm.reduce, codec).values, dtype)
    values, _ = fp32_ordered(partials_WTH, comm, codec)
    if stage in stages:
        assert comm.gather is not None
        return round_to_dtype(codec.round_trip(values, comm.gather).values, dtype)
    return values
