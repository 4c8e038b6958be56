"""Bytes that each rank sends to others, per algorithm and stage, without tensors (WIRE.md, "Reduce").

A message is partitioned among ranks by the blocks of the gather format. In the reduce stage a rank receives every
reduce-format block that holds an element it owns, so a block on a border between two ranks travels to both.
W ranks, n ranks per node, N = T * H elements.
"""

import functools
from collections.abc import Sequence

from fc_eval.collective.base import StageTraffic, Traffic
from fc_eval.collective.comm import Comm
from fc_eval.collective.peer_rules import PeerMessage, message_of
from fc_eval.errors import FcEvalError
from fc_eval.wire.layout import DTYPE_BYTES, Layout, layout, owned_blocks

_TORCH_NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


@functools.lru_cache(maxsize=4096)
def traffic_of(comm: Comm, world_size: int, tokens: int, hidden: int, dtype: object) -> Traffic:
    """What one all-reduce of [tokens, hidden] values moves; cached, since it is asked for at every call.

    Args:
        comm: algorithm and formats.
        world_size: W; 1 moves nothing.
        tokens: T, at least 0.
        hidden: H, at least 1.
        dtype: 'bf16', 'fp16', 'fp32' or the torch dtype of that name.

    Raises:
        FcEvalError: an impossible shape or dtype, W below 1, or a node size that does not divide W.
    """
    comm = comm.at(tokens)
    if world_size < 1:
        raise FcEvalError(f"world size {world_size} is not possible: expected at least 1")
    if comm.node_size is not None and world_size % comm.node_size:
        raise FcEvalError(
            f"node_size={comm.node_size} does not divide the world size {world_size}: "
            f"hierarchical needs nodes of equal size"
        )
    name = _TORCH_NAMES.get(str(dtype), str(dtype))
    if name not in DTYPE_BYTES:
        raise FcEvalError(f"dtype {name!r} is not supported: expected {', '.join(DTYPE_BYTES)}")
    elements = tokens * hidden
    if world_size == 1:
        return Traffic(elements, (), 0)
    if comm.peer is not None:
        stages = _peer(world_size, message_of(comm.peer, world_size, tokens, hidden))
        return Traffic(elements, stages, len(stages))
    if comm.reduce is None:
        return Traffic(elements, _unquantized(world_size, elements, DTYPE_BYTES[name]), 0)
    shape = layout(comm.reduce, tokens, hidden, name)
    if comm.gather is None:
        sent = shape.total_bytes * (world_size - 1)
        return Traffic(elements, (StageTraffic("reduce", (sent,) * world_size, shape.total_bytes),), 1)
    gathered = layout(comm.gather, tokens, hidden, name)
    if comm.algorithm == "ring":
        return Traffic(elements, _ring(world_size, shape, gathered), world_size)
    stages = _nodes(world_size, comm.node_size or world_size, shape, gathered)
    return Traffic(elements, stages, len(stages))


def owned_elements(shape: Layout, rank: int, world_size: int) -> range:
    """The elements of the flat [T * H] message that lie in the blocks of `rank`, padding left out."""
    owned = owned_blocks(shape.blocks, rank, world_size)
    return range(_first_element(shape, owned.start), _first_element(shape, owned.stop))


def _first_element(shape: Layout, block: int) -> int:
    """Flat index of the first real element at or after the start of `block`."""
    row, group = divmod(min(block * shape.groups_per_block, shape.groups), shape.groups_per_row)
    return row * shape.hidden + group * shape.group


def overlapping_blocks(shape: Layout, elements: range) -> range:
    """The blocks of a message that hold any of a run of flat elements."""
    if not elements:
        return range(0)
    first, last = (
        (index // shape.hidden * shape.groups_per_row + index % shape.hidden // shape.group) // shape.groups_per_block
        for index in (elements[0], elements[-1])
    )
    return range(first, last + 1)


def _unquantized(world_size: int, elements: int, width: int) -> tuple[StageTraffic, ...]:
    """Reduce-scatter and all-gather of raw values, rank r owning elements [r * N // W, (r + 1) * N // W)."""
    owned = [len(owned_blocks(elements, rank, world_size)) for rank in range(world_size)]
    return (
        StageTraffic("reduce", tuple((elements - own) * width for own in owned), elements * width),
        StageTraffic("gather", tuple(own * (world_size - 1) * width for own in owned), elements * width),
    )


def _nodes(world_size: int, node_size: int, shape: Layout, gathered: Layout) -> tuple[StageTraffic, ...]:
    """Two-step inside nodes of n ranks, an exchange between W / n nodes; a stage among one rank does not exist."""
    owned = [len(owned_blocks(gathered.blocks, index, node_size)) * gathered.block_bytes for index in range(node_size)]
    received = [
        len(overlapping_blocks(shape, owned_elements(gathered, index, node_size))) * shape.block_bytes
        for index in range(node_size)
    ]
    return _stages(world_size, received, owned, (shape.total_bytes, gathered.total_bytes))


def _peer(world_size: int, message: PeerMessage) -> tuple[StageTraffic, ...]:
    """Another system's two-step, inside islands where it has them, or its one step."""
    if message.one_step:
        return (StageTraffic("reduce", ((world_size - 1) * message.total_bytes,) * world_size, message.total_bytes),)
    owned = message.owned_bytes()
    return _stages(world_size, owned, owned, (message.total_bytes, message.total_bytes))


def _stages(
    world_size: int, received: Sequence[int], owned: Sequence[int], encoded: tuple[int, int]
) -> tuple[StageTraffic, ...]:
    """What the n ranks of a node receive of a message of the first format and own of one of the second, in bytes."""
    node_size = len(owned)
    nodes = world_size // node_size
    stages = []
    if node_size > 1:
        stages.append(("reduce", [sum(received) - own for own in received], encoded[0]))
    if nodes > 1:
        stages.append(("exchange", [own * (nodes - 1) for own in received], encoded[0]))
    if node_size > 1:
        stages.append(("gather", [own * (node_size - 1) for own in owned], encoded[1]))
    return tuple(StageTraffic(name, tuple(sent) * nodes, nbytes) for name, sent, nbytes in stages)


def _ring(world_size: int, shape: Layout, gathered: Layout) -> tuple[StageTraffic, ...]:
    """Chunk c passes every rank but its owner c in the reduce stage, and every rank but c - 1 in the gather stage."""
    chunks = [len(owned_blocks(shape.blocks, rank, world_size)) for rank in range(world_size)]
    after = chunks[1:] + chunks[:1]
    return (
        StageTraffic("reduce", tuple((sum(chunks) - own) * shape.block_bytes for own in chunks), shape.total_bytes),
        StageTraffic("gather", tuple((sum(chunks) - n) * gathered.block_bytes for n in after), gathered.total_bytes),
    )
