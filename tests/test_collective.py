"""Every algorithm equals the oracle bit for bit and sums in the stated order."""

import itertools

import numpy as np
import oracle_floats
import oracle_reduce
import pytest
import torch
from cases import COMMS, Case, order_sensitive

from fc_eval.codec.base import DTYPES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError

CODEC = ReferenceCodec()
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
    monkeypatch.setattr("fc_eval.collective.all_reduce.PORTION_ELEMENTS_PER_THREAD", 1)
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


@pytest.mark.parametrize(("name", "world_size"), COMMS)
def test_no_gradient_flows(name, world_size):
    partials = Case("int4", "bf16", 3, 70, "normal").partials(world_size)
    tracked = all_reduce(partials.clone().requires_grad_(), parse_comm(name), CODEC).values
    assert torch.equal(tracked, all_reduce(partials, parse_comm(name), CODEC).values)
    assert not tracked.requires_grad


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
    with pytest.raises(FcEvalError, match="cannot rotate"):
        all_reduce(good, parse_comm("ring:int4-had"), CODEC)
    with pytest.raises(FcEvalError, match="same group size"):
        parse_comm("ring:int4-g32/int4-g64")


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
