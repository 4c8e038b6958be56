"""The all-reduce between real ranks: this rank's partial sum in, the reduced tensor out, wire bytes in between.

The emulated algorithms beside this file are the definition: the same bits, and the traffic that `traffic_of` says. Each
rank counts the non-finite groups that it alone is responsible for, so that the sum over ranks is the emulator's count.
W ranks, T tokens, H hidden.
"""

from collections import Counter
from collections.abc import Callable

import torch

from fc_eval.codec.base import DTYPE_NAMES, Codec
from fc_eval.codec.canonical import canonical_nan_, round_to_dtype
from fc_eval.collective.base import Reduced
from fc_eval.collective.comm import Comm
from fc_eval.collective.distributed_nodes import hierarchical, two_step
from fc_eval.collective.distributed_ring import ring
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.traffic import traffic_of
from fc_eval.wire.layout import owned_blocks

Algorithm = Callable[[torch.Tensor, Comm, Codec, Ranks], tuple[torch.Tensor, list[torch.Tensor]]]


def all_reduce(partial_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks) -> Reduced:
    """Reduces the partial sum of this rank with those of the others, who all call this with the same shape and comm.

    Args:
        partial_TH: [T, H] in bf16, fp16 or fp32, on the device that the group communicates from.
        comm: algorithm and formats. At W = 1 all of them are the identity.
        codec: covers `comm.formats` for this dtype and device.
        ranks: the group.

    Returns:
        Values that are the same bits on every rank, the traffic of the whole group, and this rank's share of the
        non-finite groups of each stage.

    Raises:
        FcEvalError: a comm that exists in emulation only, or a node size that does not divide W.
        LostProcessError: another rank has ended, or has not come within the group's timeout.
    """
    partial_TH = partial_TH.detach().contiguous()
    comm = comm.at(len(partial_TH))
    traffic = traffic_of(comm, ranks.world_size, *partial_TH.shape, DTYPE_NAMES[partial_TH.dtype])
    comm.check_between_ranks()
    none = torch.zeros(len(traffic.stages), dtype=torch.int64, device=partial_TH.device)
    if ranks.world_size == 1 or not partial_TH.numel():
        return Reduced(partial_TH, traffic, none)
    before = Counter(ranks.sent)
    values, counts = ALGORITHMS[comm.algorithm](partial_TH, comm, codec, ranks)
    promised = Counter({stage.stage: stage.bytes_per_rank[ranks.rank] for stage in traffic.stages})
    assert comm.algorithm == "plain" or ranks.sent - before == +promised  # what travels is what is reported
    return Reduced(values, traffic, torch.stack(counts) if counts else none)


def one_step(
    partial_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Every rank sends its whole encoded partial sum to every other rank, which sums."""
    assert comm.reduce is not None
    wire = codec.encode(partial_TH, comm.reduce)
    everyone = ranks.exchange([wire] * ranks.world_size, [wire.numel()] * ranks.world_size, "reduce")
    shape = partial_TH.shape[0], partial_TH.shape[1]
    total, own = None, None
    for rank, message in enumerate(everyone):
        received = codec.decode(message, comm.reduce, shape, partial_TH.dtype)
        own = received.nonfinite_groups if rank == ranks.rank else own
        total = received.values if total is None else total.add_(received.values)
    assert total is not None
    assert own is not None
    return round_to_dtype(total, partial_TH.dtype), [own]


def fp32_ordered(
    partial_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Raw values to their owner, who sums in fp32 in rank order; the rounded sums to everyone."""
    size, width = ranks.world_size, partial_TH.element_size()
    owned = [owned_blocks(partial_TH.numel(), rank, size) for rank in range(size)]
    own = owned[ranks.rank]
    raw = partial_TH.view(-1).view(torch.uint8)
    pieces = [raw[part.start * width : part.stop * width] for part in owned]
    arrived = [piece.view(partial_TH.dtype) for piece in ranks.exchange(pieces, [len(own) * width] * size, "reduce")]
    total = arrived[0].float() + 0.0
    for piece in arrived[1:]:
        total.add_(piece)
    mine = round_to_dtype(total, partial_TH.dtype).view(torch.uint8)
    gathered = torch.cat(ranks.exchange([mine] * size, [len(part) * width for part in owned], "gather"))
    return gathered.view(partial_TH.dtype).view_as(partial_TH), []


def plain(partial_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The framework's own all-reduce, which adds in an order of its own."""
    return canonical_nan_(ranks.all_reduce_(partial_TH.clone())), []


ALGORITHMS: dict[str, Algorithm] = {
    "two_step": two_step,
    "one_step": one_step,
    "ring": ring,
    "hierarchical": hierarchical,
    "fp32_ordered": fp32_ordered,
    "plain": plain,
}
