"""The ring between real ranks (see `ring.py`): each rank sends to its right neighbour and hears from its left one.

Chunk c starts at rank c + 1 and grows by one partial sum per hop until it is at its owner c; then the owner's encoded
chunk goes once around, passed on as it is. A hop is an exchange in which all but the neighbours' pieces are empty.
"""

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.collective.comm import Comm
from fc_eval.collective.pieces import Window, broken_groups, message_layout
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.traffic import owned_elements
from fc_eval.wire.layout import owned_blocks


def ring(partial_TH: torch.Tensor, comm: Comm, codec: Codec, ranks: Ranks) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Values [T, H], and this rank's share of the non-finite groups of both stages."""
    assert comm.reduce is not None
    assert comm.gather is not None
    dtype, size, rank = partial_TH.dtype, ranks.world_size, ranks.rank
    reduced = message_layout(comm.reduce, partial_TH.shape, dtype)
    gathered = message_layout(comm.gather, partial_TH.shape, dtype)
    # Both formats have the same groups, so a chunk is the same blocks in both.
    chunks = [owned_blocks(reduced.blocks, owner, size) for owner in range(size)]
    elements = [owned_elements(reduced, owner, size) for owner in range(size)]
    windows = [Window.around(reduced, blocks) for blocks in chunks]
    flat = partial_TH.view(-1)
    broken = torch.zeros(2, dtype=torch.int64, device=partial_TH.device)

    def own_part(chunk: int) -> torch.Tensor:
        return flat[elements[chunk].start : elements[chunk].stop]

    chunk = (rank - 1) % size
    running = own_part(chunk)
    for _ in range(size - 1):
        wire = windows[chunk].encode(running, elements[chunk], codec)
        chunk = (chunk - 1) % size
        wire = _pass_on(ranks, wire, len(chunks[chunk]) * reduced.block_bytes, "reduce")
        values_RH = windows[chunk].decode(wire, dtype, codec)
        broken[0] += broken_groups(values_RH, windows[chunk].rows.start, reduced, elements[chunk])
        received = values_RH.view(-1)[windows[chunk].flat(elements[chunk])]
        running = received.add_(own_part(chunk)).to(dtype)
    assert chunk == rank

    wires = [running.new_empty(0, dtype=torch.uint8)] * size
    wires[rank] = Window.around(gathered, chunks[rank]).encode(running, elements[rank], codec)
    for hop in range(size - 1):
        chunk, arriving = (rank - hop) % size, (rank - hop - 1) % size
        wires[arriving] = _pass_on(ranks, wires[chunk], len(chunks[arriving]) * gathered.block_bytes, "gather")
    values_TH = codec.decode(torch.cat(wires), comm.gather, (gathered.tokens, gathered.hidden), dtype).values
    broken[1] += broken_groups(values_TH, 0, gathered, elements[rank])
    return round_to_dtype(values_TH, dtype), list(broken)


def _pass_on(ranks: Ranks, wire: torch.Tensor, arriving_bytes: int, stage: str) -> torch.Tensor:
    """Sends to the right neighbour; returns what the left one sent."""
    right, left = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    outgoing = [wire if rank == right else wire[:0] for rank in range(ranks.world_size)]
    incoming = [arriving_bytes if rank == left else 0 for rank in range(ranks.world_size)]
    return ranks.exchange(outgoing, incoming, stage)[left]
