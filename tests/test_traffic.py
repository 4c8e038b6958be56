"""Bytes that each rank sends: those of the blocks that are needed, counted here element by element."""

import pytest
import torch
from cases import Case

from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.comm import parse_comm
from fc_eval.collective.traffic import owned_elements, traffic_of
from fc_eval.errors import FcEvalError
from fc_eval.wire.layout import Layout, layout, owned_blocks

CODEC = ReferenceCodec()


def blocks_with(shape: Layout, elements: set[int]) -> set[int]:
    """The blocks that hold any of these elements, element by element."""
    found = set()
    for element in elements:
        row, column = divmod(element, shape.hidden)
        found.add((row * shape.groups_per_row + column // shape.group) // shape.groups_per_block)
    return found


def owned_sets(shape: Layout, world_size: int) -> list[set[int]]:
    """The elements that each rank owns, element by element."""
    everything = range(shape.tokens * shape.hidden)
    return [
        {e for e in everything if blocks_with(shape, {e}) <= set(owned_blocks(shape.blocks, rank, world_size))}
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    "comm", ["int4-g32", "int4-g32/int8-g100", "int4/int8-g9", "int4-gtoken/int8", "int8/int4-gtoken"]
)
@pytest.mark.parametrize(("world_size", "tokens", "hidden"), [(2, 3, 300), (3, 7, 576), (8, 2, 576), (4, 1, 20)])
def test_two_step_sends_the_blocks_that_are_needed(comm, world_size, tokens, hidden):
    parsed = parse_comm(comm)
    reduce, gather = (layout(fmt, tokens, hidden, "bf16") for fmt in (parsed.reduce, parsed.gather))
    owned = owned_sets(gather, world_size)
    assert set().union(*owned) == set(range(tokens * hidden))
    assert [set(owned_elements(gather, rank, world_size)) for rank in range(world_size)] == owned
    needed = [len(blocks_with(reduce, part)) for part in owned]
    traffic = traffic_of(parsed, world_size, tokens, hidden, "bf16")
    first, second = traffic.stages
    assert first.bytes_per_rank == tuple((sum(needed) - own) * reduce.block_bytes for own in needed)
    held = [len(owned_blocks(gather.blocks, rank, world_size)) for rank in range(world_size)]
    assert second.bytes_per_rank == tuple(n * (world_size - 1) * gather.block_bytes for n in held)
    assert (first.encoded_bytes, second.encoded_bytes) == (reduce.total_bytes, gather.total_bytes)


def test_bytes_really_needed():
    """The counted blocks, with garbage elsewhere, decode to all that a rank owns; one block less is too few."""
    comm = parse_comm("int4-g32/int8-g100")
    x = Case("int4", "bf16", 7, 300, "normal").values()
    reduce, gather = (layout(fmt, 7, 300, "bf16") for fmt in (comm.reduce, comm.gather))
    whole = CODEC.encode(x, comm.reduce).view(reduce.blocks, reduce.block_bytes)
    values = CODEC.decode(whole.flatten(), comm.reduce, (7, 300), x.dtype).values.flatten()
    for rank in range(3):
        owned = sorted(owned_elements(gather, rank, 3))
        needed = sorted(blocks_with(reduce, set(owned)))
        for dropped in (None, *needed):
            received = torch.full_like(whole, 0x3F)
            kept = [block for block in needed if block != dropped]
            received[kept] = whole[kept]
            got = CODEC.decode(received.flatten(), comm.reduce, (7, 300), x.dtype).values.flatten()
            assert torch.equal(got[owned], values[owned]) == (dropped is None)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["int4-g32", "ring:int4-g32", "int4-g32/int8-g32"])
def test_all_ranks_together_send_every_block_to_every_other(name, world_size):
    """With equal group sizes: W - 1 times the message in each stage, whatever the algorithm."""
    comm = parse_comm(name)
    for stage, fmt in zip(traffic_of(comm, world_size, 7, 576, "fp16").stages, (comm.reduce, comm.gather), strict=True):
        assert stage.encoded_bytes == layout(fmt, 7, 576, "fp16").total_bytes
        assert sum(stage.bytes_per_rank) == (world_size - 1) * stage.encoded_bytes


def test_ring_passes_chunks_on():
    """T = 3, H = 1024, g = 32: 3 blocks; ranks 1, 2, 3 of 4 own one each, rank 0 none."""
    comm = parse_comm("ring:int4-g32/int8-g32")
    reduce, gather = (layout(fmt, 3, 1024, "bf16").block_bytes for fmt in (comm.reduce, comm.gather))
    first, second = traffic_of(comm, 4, 3, 1024, "bf16").stages
    assert first.bytes_per_rank == (3 * reduce, 2 * reduce, 2 * reduce, 2 * reduce)  # all chunks but the own
    assert second.bytes_per_rank == (2 * gather, 2 * gather, 2 * gather, 3 * gather)  # all but the next rank's


def test_hierarchical_stages():
    """W = 4 in nodes of 2, T = 4, H = 1024, g = 32: each index owns 2 of the 4 blocks."""
    comm = parse_comm("hierarchical@2:int4-g32/int8-g32")
    reduce, gather = (layout(fmt, 4, 1024, "bf16").block_bytes for fmt in (comm.reduce, comm.gather))
    traffic = traffic_of(comm, 4, 4, 1024, "bf16")
    assert [(s.stage, s.bytes_per_rank) for s in traffic.stages] == [
        ("reduce", (2 * reduce,) * 4),
        ("exchange", (2 * reduce,) * 4),
        ("gather", (2 * gather,) * 4),
    ]
    assert traffic.qdq_rounds == 3


def test_traffic_in_numbers():
    """INT4 g128 in bf16 is 544 bytes a block; 4 blocks, W = 2: each rank sends 2 blocks per stage."""
    traffic = traffic_of(parse_comm("int4"), 2, 4, 1024, torch.bfloat16)
    assert traffic.wire_bytes_per_rank == 4 * 544
    assert (traffic.effective_bits, traffic.qdq_rounds, traffic.elements) == (4.25, 2, 4096)
    one_step = traffic_of(parse_comm("one_step:int4"), 2, 4, 1024, "bf16")
    assert (one_step.wire_bytes_per_rank, one_step.qdq_rounds) == (4 * 544, 1)
    assert traffic_of(parse_comm("int4_int8"), 2, 4, 1024, "bf16").effective_bits == 6.25
    assert traffic_of(parse_comm("ring:int4"), 4, 4, 1024, "bf16").qdq_rounds == 4
    plain = traffic_of(parse_comm("plain"), 3, 1, 8, "fp32")
    # 8 elements, owned 2, 3, 3: all but the own part is sent, then the own part to two others.
    assert [s.bytes_per_rank for s in plain.stages] == [(24, 20, 20), (16, 24, 24)]
    assert (plain.effective_bits, plain.wire_bytes_per_rank, plain.qdq_rounds) == (32.0, 44, 0)
    assert traffic_of(parse_comm("fp32_ordered"), 3, 1, 8, "fp32") == plain


def test_mistakes_are_named():
    with pytest.raises(FcEvalError, match="world size 0"):
        traffic_of(parse_comm("int4"), 0, 1, 8, "bf16")
    with pytest.raises(FcEvalError, match="int8"):
        traffic_of(parse_comm("int4"), 2, 1, 8, torch.int8)
    with pytest.raises(FcEvalError, match="node_size=3 does not divide the world size 8"):
        traffic_of(parse_comm("hierarchical@3:int4"), 8, 1, 8, "bf16")
