"""The emulated all-reduce: partial sums of all ranks in, the tensor that every rank would hold out.

Generic in the codec: no algorithm knows how bytes look. W ranks, T tokens, H hidden.
"""

from collections.abc import Callable
from typing import cast

import torch

from fc_eval.codec.base import DTYPE_NAMES, Codec, FusedCodec
from fc_eval.codec.eager import eager
from fc_eval.collective.base import Reduced
from fc_eval.collective.comm import Comm
from fc_eval.collective.hierarchical import hierarchical
from fc_eval.collective.one_step import one_step
from fc_eval.collective.peer import reduce_as_peer
from fc_eval.collective.ring import ring
from fc_eval.collective.traffic import traffic_of
from fc_eval.collective.two_step import two_step
from fc_eval.collective.unquantized import fp32_ordered, plain
from fc_eval.errors import FcEvalError

# (partial sums [W, T, H] with W >= 2 and T possibly 0, comm, codec) to the values [T, H] in their dtype and, for each
# stage that quantizes, its non-finite groups as int64 []; everything on the device of the partial sums.
Algorithm = Callable[[torch.Tensor, Comm, Codec], tuple[torch.Tensor, list[torch.Tensor]]]

# Every one gives a row the same result whatever rows are beside it, except the ring.
BY_ROWS: dict[str, Algorithm] = {
    "two_step": two_step,
    "one_step": one_step,
    "hierarchical": hierarchical,
    "fp32_ordered": fp32_ordered,
    "plain": plain,
}
BY_CHUNKS: dict[str, Algorithm] = {"ring": ring}

# On the CPU rows are reduced in portions whose fp32 temporaries (1 MiB per thread each) stay in the second-level cache.
PORTION_ELEMENTS_PER_THREAD = 2**18


@eager
def all_reduce(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> Reduced:
    """Reduces the partial sums of W ranks as `comm` says, bit for bit as W real ranks would (WIRE.md, "Reduce").

    No gradient flows back.

    Args:
        partials_WTH: [W, T, H] in bf16, fp16 or fp32, rank r's partial sum at index r; any strides, any device.
        comm: algorithm and formats. At W = 1 all of them are the identity.
        codec: covers `comm.formats` for this dtype and device; not used for another system's all-reduce, whose
            arithmetic is its own.

    Returns:
        Values [T, H] in the dtype of the partial sums (at W = 1 a view of the only one), traffic and non-finite groups.

    Raises:
        FcEvalError: wrong dimensions or dtype, a node size that does not divide W, a format the codec does not cover.
    """
    if partials_WTH.dim() != 3 or 0 in (partials_WTH.shape[0], partials_WTH.shape[2]):
        raise FcEvalError(
            f"partial sums of shape {list(partials_WTH.shape)} cannot be reduced: expected [ranks, tokens, hidden]"
        )
    if partials_WTH.dtype not in DTYPE_NAMES:
        raise FcEvalError(f"partial sums in {partials_WTH.dtype} cannot be reduced: expected bf16, fp16 or fp32")
    partials_WTH = partials_WTH.detach()
    world_size, tokens, hidden = partials_WTH.shape
    comm = comm.at(tokens)
    traffic = traffic_of(comm, world_size, tokens, hidden, DTYPE_NAMES[partials_WTH.dtype])
    if world_size == 1:
        return Reduced(partials_WTH[0], traffic, _no_groups(partials_WTH, 0))
    if comm.peer is not None:
        return reduce_as_peer(partials_WTH, comm.peer, traffic)
    if (fused := _fused(codec, comm, partials_WTH)) is not None:
        values, nonfinite = fused.fused_all_reduce(partials_WTH, comm)
    else:
        reduce = _by_portions if comm.algorithm in BY_ROWS else BY_CHUNKS[comm.algorithm]
        values, counts = reduce(partials_WTH, comm, codec)
        nonfinite = torch.stack(counts) if counts else _no_groups(partials_WTH, 0)
    if not comm.is_quantized:
        nonfinite = _no_groups(partials_WTH, len(traffic.stages))
    return Reduced(values, traffic, nonfinite)


def _fused(codec: Codec, comm: Comm, partials_WTH: torch.Tensor) -> FusedCodec | None:
    """The codec, if it has a faster way to the same bits."""
    # `isinstance` would look at every member of the protocol at every call, a sixth of what a single token takes.
    if not hasattr(codec, "fused_all_reduce"):
        return None
    fused = cast(FusedCodec, codec)
    return fused if fused.why_not_fused(comm, partials_WTH.dtype, partials_WTH.device) is None else None


def _no_groups(like: torch.Tensor, stages: int) -> torch.Tensor:
    return torch.zeros(stages, dtype=torch.int64, device=like.device)


def _by_portions(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An `Algorithm` of `BY_ROWS` applied to as many rows at a time as the cache holds."""
    algorithm = BY_ROWS[comm.algorithm]
    _, tokens, hidden = partials_WTH.shape
    rows = max(1, PORTION_ELEMENTS_PER_THREAD * torch.get_num_threads() // hidden)
    if partials_WTH.device.type != "cpu" or tokens <= rows:
        return algorithm(partials_WTH, comm, codec)
    values = partials_WTH.new_empty((tokens, hidden))
    per_portion = []
    for start in range(0, tokens, rows):
        portion, counts = algorithm(partials_WTH[:, start : start + rows], comm, codec)
        values[start : start + rows] = portion
        per_portion.append(counts)
    return values, [torch.stack(stage).sum() for stage in zip(*per_portion, strict=True)]
