"""Every algorithm equals the oracle bit for bit, sums in the stated order, and moves the bytes that it says."""

import itertools

import numpy as np
import oracle_floats
import oracle_reduce
import pytest
import torch
from cases import Case, order_sensitive

from fc_eval.codec.base import DTYPES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.collective.traffic import owned_elements, traffic_of
from fc_eval.errors import FcEvalError
from fc_eval.wire.layout import Layout, layout, owned_blocks

CODEC = ReferenceCodec()
# (comm, W): every algorithm, unequal formats and group sizes, a W that does not divide the blocks.
COMMS = [
    ("plain", 3),
    ("fp32_ordered", 3),
    ("int4-g32", 2),
    ("int4-g32/int8-g100-sym", 3),
    ("fp8_e4m3-g32/int3-gtoken-se", 4),
    ("int8-sfp16", 8),
    ("one_step:int6-g32", 3),
    ("one_step:fp4_e2m1-g9", 2),
    ("ring:int4-g32", 4),
    ("ring:int5-g8/int8-g8-sym", 3),
    ("ring:int8-gtoken", 2),
    ("hierarchical@2:int4-g32", 4),
    ("hierarchical@3:int6-g9-se/int8-g32", 6),
    ("hierarchical@2:int4-g32/int8", 2),
    ("hierarchical@1:int4-g32/int8", 3),
]
DISTRIBUTIONS = ["normal", "one_outlier", "signed_zeros", "ties", "subnormal", "top", "nonfinite"]


def codes_of(values: torch.Tensor) -> list[list[int]]:
    """The bits of bf16, fp16 or fp32 values."""
    if values.dtype == torch.float32:
        return values.contiguous().numpy().view(np.uint32).tolist()
    return values.contiguous().view(torch.int16).numpy().view(np.uint16).tolist()


def assert_equals_oracle(partials: torch.Tensor, comm: Comm, dtype_name: str) -> None:
    result = all_reduce(partials, comm, CODEC)
    values, counts = oracle_reduce.all_reduce(
        [[list(r) for r in p.float().numpy()] for p in partials], comm, dtype_name
    )
    assert result.values.dtype == partials.dtype
    assert codes_of(result.values) == [[oracle_floats.to_bits(v, dtype_name) for v in row] for row in values]
    assert result.nonfinite_groups.tolist() == counts
    assert result.nonfinite_groups.dtype == torch.int64
    assert len(result.traffic.stages) == len(counts)


@pytest.mark.parametrize("dtype_name", sorted(DTYPES))
@pytest.mark.parametrize(("name", "world_size"), COMMS)
def test_values_equal_the_oracle(name, world_size, dtype_name):
    for shape, distribution in zip(itertools.cycle([(2, 130), (5, 70), (9, 20)]), DISTRIBUTIONS, strict=False):
        case = Case("int4", dtype_name, *shape, distribution)
        assert_equals_oracle(case.partials(world_size), parse_comm(name), dtype_name)


@pytest.mark.parametrize("dtype_name", sorted(DTYPES))
@pytest.mark.parametrize(
    "name", ["int4-g32", "one_step:int8", "fp32_ordered", "plain", "ring:int4-g32", "hierarchical@2:int8"]
)
def test_sums_in_rank_order(name, dtype_name):
    """2^24, 1, -2^24 on different ranks: constant groups are exact in asym, so the order alone decides."""
    for world_size in (2, 4, 8):
        assert_equals_oracle(order_sensitive(world_size, 2, 70, DTYPES[dtype_name]), parse_comm(name), dtype_name)


def test_order_sensitive_sums_differ_between_orders():
    """The case above can fail: the same partial sums in another order give another value."""
    partials = order_sensitive(4, 1, 32, torch.float32)
    forward = all_reduce(partials, parse_comm("int4-g32"), CODEC).values
    backward = all_reduce(partials.flip(0), parse_comm("int4-g32"), CODEC).values
    assert not torch.equal(forward, backward)


@pytest.mark.parametrize(
    "name", ["int4-g32", "one_step:int4-g32", "ring:int4-g32", "hierarchical@1:int4-g32", "plain", "fp32_ordered"]
)
def test_one_rank_is_the_identity(name):
    partials = torch.full((1, 3, 40), -0.0).bfloat16()
    partials[0, 1, 2] = float("inf")
    result = all_reduce(partials, parse_comm(name), CODEC)
    assert codes_of(result.values) == codes_of(partials[0])
    assert result.traffic.stages == ()
    assert (result.traffic.wire_bytes_per_rank, result.traffic.effective_bits, result.traffic.qdq_rounds) == (0, 0.0, 0)
    assert result.nonfinite_groups.shape == (0,)


@pytest.mark.parametrize(
    "name", ["int4-g32", "one_step:int4-g100", "hierarchical@2:int4-g32/int8", "fp32_ordered", "plain"]
)
def test_a_token_does_not_depend_on_the_batch(name, monkeypatch):
    """Nor on the portions in which the rows are reduced."""
    partials = Case("int4", "bf16", 7, 300, "normal").partials(4)
    comm = parse_comm(name)
    whole = all_reduce(partials, comm, CODEC)
    alone = torch.cat([all_reduce(partials[:, i : i + 1], comm, CODEC).values for i in range(7)])
    assert torch.equal(whole.values, alone)
    partials[2, 5, 7] = float("nan")
    whole = all_reduce(partials, comm, CODEC)
    monkeypatch.setattr("fc_eval.collective.all_reduce.CPU_PORTION_ELEMENTS", 900)
    portions = all_reduce(partials, comm, CODEC)
    assert codes_of(portions.values) == codes_of(whole.values)
    assert torch.equal(portions.nonfinite_groups, whole.nonfinite_groups)


@pytest.mark.parametrize(("name", "world_size"), COMMS)
def test_strides_do_not_matter_and_inputs_stay(name, world_size):
    partials = Case("int4", "bf16", 5, 70, "nonfinite").partials(world_size)
    strided = partials.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    before = codes_of(partials.flatten(0, 1))
    plain, other = (all_reduce(x, parse_comm(name), CODEC).values for x in (partials, strided))
    assert codes_of(plain) == codes_of(other)
    assert codes_of(partials.flatten(0, 1)) == before == codes_of(strided.flatten(0, 1))


def test_extremes_of_the_hierarchy():
    """Nodes of all ranks are two-step, nodes of one rank are one-step."""
    partials = Case("int4", "bf16", 4, 70, "normal").partials(4)
    for node, other in ((4, "int4-g32/int8"), (1, "one_step:int4-g32")):
        comm = parse_comm(f"hierarchical@{node}:int4-g32/int8")
        result, expected = (all_reduce(partials, c, CODEC) for c in (comm, parse_comm(other)))
        assert torch.equal(result.values, expected.values)
        assert result.traffic.wire_bytes_per_rank == expected.traffic.wire_bytes_per_rank


def test_no_tokens():
    for name, world_size in COMMS:
        result = all_reduce(torch.empty(world_size, 0, 70, dtype=torch.bfloat16), parse_comm(name), CODEC)
        assert result.values.shape == (0, 70)
        assert result.traffic.wire_bytes_per_rank == 0
        assert result.nonfinite_groups.sum() == 0


# Traffic --------------------------------------------------------------------------------------------------------------


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
    good, comm = torch.zeros(2, 3, 8), parse_comm("int4")
    for partials, message in (
        (torch.zeros(3, 8), r"shape \[3, 8\]"),
        (torch.zeros(0, 3, 8), r"shape \[0, 3, 8\]"),
        (torch.zeros(2, 3, 0), r"shape \[2, 3, 0\]"),
        (good.double(), "torch.float64"),
    ):
        with pytest.raises(FcEvalError, match=message):
            all_reduce(partials, comm, CODEC)
    with pytest.raises(FcEvalError, match="node_size=2 does not divide the world size 3"):
        all_reduce(torch.zeros(3, 3, 8), parse_comm("hierarchical@2:int4"), CODEC)
    with pytest.raises(FcEvalError, match="spikes"):
        all_reduce(good, parse_comm("int4-sr"), CODEC)
    with pytest.raises(FcEvalError, match="cannot rotate"):
        all_reduce(good, parse_comm("ring:int4-had"), CODEC)
    with pytest.raises(FcEvalError, match="same group size"):
        parse_comm("ring:int4-g32/int4-g64")
    with pytest.raises(FcEvalError, match="world size 0"):
        traffic_of(comm, 0, 1, 8, "bf16")
    with pytest.raises(FcEvalError, match="int8"):
        traffic_of(comm, 2, 1, 8, torch.int8)


class Fused(ReferenceCodec):
    """A codec with its own way through two-step, and no other."""

    def why_not_fused(self, comm, dtype, device):
        return None if comm.algorithm in ("two_step", "fp32_ordered") else "two_step only"

    def fused_all_reduce(self, partials_WTH, comm):
        return partials_WTH[1] + 7, torch.full((2,), 5)


def test_a_codec_with_a_fused_all_reduce_is_asked_first():
    partials = torch.zeros(2, 1, 8)
    fused = all_reduce(partials, parse_comm("int4"), Fused())
    assert fused.values.tolist() == [[7.0] * 8]
    assert fused.nonfinite_groups.tolist() == [5, 5]
    assert all_reduce(partials, parse_comm("fp32_ordered"), Fused()).nonfinite_groups.tolist() == [0, 0]
    assert all_reduce(partials, parse_comm("one_step:int4"), Fused()).values.tolist() == [[0.0] * 8]
