"""Two-step and hierarchical between real ranks (see `two_step.py` and `hierarchical.py`): two-step is one single node.

    reduce-scatter in the node -> exchange and sum between ranks of the same index -> all-gather in the node

Rank `index` of a node owns the blocks of the gather format with that number. It is sent every block of the reduce
format that holds anything of them, so a block on a border goes to both sides. T tokens, H hidden, R rows of a window.
"""

from collections.abc import Container, Sequence

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.collective.comm import Comm
from fc_eval.collective.pieces import Window, block_bytes, broken_groups, message_layout
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.traffic import overlapping_blocks, owned_elements
from fc_eval.wire.layout import owned_blocks


def two_step(
    partial_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Values [T, H], and this rank's share of the non-finite groups of both stages."""
    share = _Share(partial_TH, comm, codec, ranks, ranks.world_size)
    sums_RH = share.reduce_scatter(partial_TH)
    return share.all_gather(sums_RH), share.counts


def hierarchical(
    partial_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Values [T, H], and this rank's share of the non-finite groups of each stage that exists."""
    assert comm.node_size is not None
    if comm.node_size == ranks.world_size:
        return two_step(partial_TH, comm, codec, ranks)
    share = _Share(partial_TH, comm, codec, ranks, comm.node_size)
    alone = comm.node_size == 1
    held_RH = partial_TH if alone else share.reduce_scatter(partial_TH).to(partial_TH.dtype)
    sums_RH = share.exchange(held_RH)
    return round_to_dtype(sums_RH, partial_TH.dtype) if alone else share.all_gather(sums_RH), share.counts


class _Share:
    """One rank's part in an all-reduce: what it owns, in which rows that lies, and the groups that it counted."""

    def __init__(self, like_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks, node_size: int) -> None:
        assert comm.reduce is not None
        assert comm.gather is not None
        self.codec, self.ranks, self.dtype = codec, ranks, like_TH.dtype
        self.node, self.index = divmod(ranks.rank, node_size)
        self.inside = range(self.node * node_size, (self.node + 1) * node_size)
        self.across = range(self.index, ranks.world_size, node_size)  # the ranks of this index, one in each node
        self.reduced = message_layout(comm.reduce, like_TH.shape, like_TH.dtype)
        self.gathered = message_layout(comm.gather, like_TH.shape, like_TH.dtype)
        owned = [owned_elements(self.gathered, index, node_size) for index in range(node_size)]
        self.owned = owned[self.index]
        self.needed = [overlapping_blocks(self.reduced, elements) for elements in owned]
        self.window = Window.around(self.reduced, self.needed[self.index])
        self.counts: list[torch.Tensor] = []

    def reduce_scatter(self, partial_TH: torch.Tensor) -> torch.Tensor:
        """The node's sum [R, H] fp32 in the rows around what this rank owns."""
        wire = self.codec.encode(partial_TH, self.reduced.format)
        pieces = [block_bytes(wire, self.reduced, blocks) for blocks in self.needed]
        size = len(self.needed[self.index]) * self.reduced.block_bytes
        return self._sum(self._swap(self.inside, pieces, [size] * len(pieces), "reduce"), self.inside, self.inside)

    def exchange(self, held_RH: torch.Tensor) -> torch.Tensor:
        """The sum over nodes [R, H] fp32 of what each holds of its own sum in this dtype."""
        first, hidden = self.window.rows.start, self.reduced.hidden
        rows = range(first * hidden, self.window.rows.stop * hidden)
        wire = self.window.encode(held_RH.reshape(-1), rows, self.codec)
        nodes = len(self.across)
        # Every rank of this index sees all messages, so each counts its own.
        arrived = self._swap(self.across, [wire] * nodes, [wire.numel()] * nodes, "exchange")
        return self._sum(arrived, self.across, [self.ranks.rank])

    def all_gather(self, sums_RH: torch.Tensor) -> torch.Tensor:
        """The whole [T, H] from what each rank of the node owns of the sum."""
        size = len(self.inside)
        own = sums_RH.view(-1)[self.window.flat(self.owned)].to(self.dtype)
        blocks = [owned_blocks(self.gathered.blocks, index, size) for index in range(size)]
        wire = Window.around(self.gathered, blocks[self.index]).encode(own, self.owned, self.codec)
        sizes = [len(own_blocks) * self.gathered.block_bytes for own_blocks in blocks]
        message = torch.cat(self._swap(self.inside, [wire] * size, sizes, "gather"))
        shape = self.gathered.tokens, self.gathered.hidden
        values_TH = self.codec.decode(message, self.gathered.format, shape, self.dtype).values
        found = broken_groups(values_TH, 0, self.gathered, self.owned)
        self.counts.append(found if self.node == 0 else torch.zeros_like(found))  # all nodes gather the same message
        return round_to_dtype(values_TH, self.dtype)

    def _sum(self, wires: Sequence[torch.Tensor], members: range, counted: Container[int]) -> torch.Tensor:
        """The members' contributions decoded and added in rank order, [R, H] fp32; groups of `counted` are counted."""
        total, found = None, torch.zeros((), dtype=torch.int64, device=wires[0].device)
        for rank, wire in zip(members, wires, strict=True):
            values_RH = self.window.decode(wire, self.dtype, self.codec)
            if rank in counted:
                found = found + broken_groups(values_RH, self.window.rows.start, self.reduced, self.owned)
            total = values_RH if total is None else total.add_(values_RH)
        assert total is not None
        self.counts.append(found)
        return total

    def _swap(
        self, members: range, pieces: Sequence[torch.Tensor], sizes: Sequence[int], stage: str
    ) -> list[torch.Tensor]:
        """Piece i goes to member i, which sends `sizes[i]` bytes back; the other ranks get nothing."""
        outgoing = [pieces[0][:0]] * self.ranks.world_size
        incoming = [0] * self.ranks.world_size
        for rank, piece, size in zip(members, pieces, sizes, strict=True):
            outgoing[rank], incoming[rank] = piece, size
        arrived = self.ranks.exchange(outgoing, incoming, stage)
        return [arrived[rank] for rank in members]
