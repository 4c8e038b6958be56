"""Spike reserving: which two elements travel, what they cost the others, and messages that no encoder wrote."""

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fc_eval.codec.base import DTYPES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.codec.spikes import take_out_
from fc_eval.wire import parse_format
from fc_eval.wire.layout import layout

CODEC = ReferenceCodec()
NAMES = ["int2-g8-sr", "int3-g9-se-sr", "int4-g8-sym-sr", "mxfp4-g8-sr", "fp8_e5m2-g16-sr", "int4-gtoken-sfp16-sr"]
# Few values, so that ties, equal groups and zeros of both signs are frequent; then anything at all.
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-133), 2.0**-24, 3e38, -3e38, 65504.0])
ANY = st.floats(width=32)


def oracle_equal(x: torch.Tensor, fmt, dtype_name: str) -> None:
    rows = [list(row) for row in x.float().numpy()]
    expected = oracle.encode(rows, fmt, dtype_name)
    assert bytes(CODEC.encode(x, fmt).numpy()) == expected
    values, broken = oracle.decode(expected, fmt, *x.shape, dtype_name)
    found = CODEC.round_trip(x, fmt)
    want = np.array(values, dtype=np.float32).reshape(x.shape).view(np.uint32)
    assert np.array_equal(found.values.numpy().view(np.uint32), want)
    assert found.nonfinite_groups == broken


@given(
    name=st.sampled_from(NAMES),
    dtype_name=st.sampled_from(sorted(DTYPES)),
    row=st.one_of(st.lists(FEW, min_size=1, max_size=20), st.lists(ANY, min_size=1, max_size=20)),
)
@settings(max_examples=150, deadline=None)
def test_any_group_equals_the_oracle(name, dtype_name, row):
    oracle_equal(torch.tensor([row]).to(DTYPES[dtype_name]), parse_format(name), dtype_name)


@given(row=st.lists(st.one_of(FEW, st.floats(-(2.0**126), 2.0**126, width=32)), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_both_extremes_arrive_unchanged(row):
    x = torch.tensor([row])
    found = CODEC.round_trip(x, parse_format("int2-g4096-sym-sr")).values[0]
    low = row.index(min(row))
    others = [i for i in range(len(row)) if i != low] or [low]
    high = max(others, key=lambda i: (row[i], -i))
    for position in (low, high):
        assert found[position] == x[0, position]
        assert math.copysign(1, found[position]) == (1 if row[position] == 0 else math.copysign(1, row[position]))


@given(
    row=st.lists(st.floats(-100, 100, width=16), min_size=3, max_size=8),
    name=st.sampled_from(["int3-g8", "int4-g8-sym", "int4-g8-se", "mxfp4-g8", "fp6_e3m2-g8"]),
)
@settings(max_examples=200, deadline=None)
def test_the_others_are_coded_as_a_group_of_their_own(row, name):
    x = torch.tensor([row])
    positions = take_out_(x.clone().unsqueeze(1)).positions.flatten().tolist()
    kept = [i for i in range(len(row)) if i not in positions]
    alone = CODEC.round_trip(x[:, kept], parse_format(name)).values
    assert torch.equal(CODEC.round_trip(x, parse_format(f"{name}-sr")).values[:, kept], alone)


@pytest.mark.parametrize(
    ("row", "positions"),
    [
        ([5.0], [0, 0]),
        ([5.0, 5.0], [0, 1]),
        ([7.0, 5.0], [1, 0]),
        ([3.0, 3.0, 3.0], [0, 1]),
        ([1.0, -2.0, 4.0, 4.0, -2.0], [1, 2]),
        ([0.0, -0.0, 0.0], [0, 1]),
        ([-1.0, 2.0, -1.0], [0, 1]),
    ],
)
def test_positions_are_the_lowest(row, positions):
    assert take_out_(torch.tensor([[row]])).positions.flatten().tolist() == positions


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_group_with_a_nan_or_an_inf_is_nan_throughout(name, bad):
    for size in (1, 2, 3, 8):
        x = torch.ones(1, size)
        x[0, size // 2] = bad
        found = CODEC.round_trip(x, parse_format(name))
        assert (found.values.view(torch.int32) == 0x7FC00000).all()
        assert found.nonfinite_groups == 1
        oracle_equal(x, parse_format(name), "fp32")


def test_spikes_may_overflow_where_the_others_do_not():
    """The range of the others decides: two huge spikes of opposite sign are as good as any."""
    x = torch.tensor([[3e38, 1.0, 2.0, -3e38]])
    assert CODEC.round_trip(x, parse_format("int8-g8")).nonfinite_groups == 1
    found = CODEC.round_trip(x, parse_format("int8-g8-sr"))
    assert (found.values.tolist(), found.nonfinite_groups.item()) == (x.tolist(), 0)
    wide = torch.tensor([[3e38, 3.1e38, -3.1e38, -3e38]])
    assert CODEC.round_trip(wide, parse_format("int8-g8-sr")).values.isnan().all()


def test_two_spikes_leave_a_constant_group_exact():
    x = torch.full((1, 128), 0.3)
    x[0, 7], x[0, 90] = -1000.0, 4096.5
    assert torch.equal(CODEC.round_trip(x, parse_format("int2-sr")).values, x)


@pytest.mark.parametrize("name", ["int4-g8-sr", "int4-g300-sym-sr", "mxfp4-gtoken-sr"])
def test_positions_outside_the_group_are_left_out(name):
    """A message that no encoder wrote: nothing outside a group is touched, min is written before max."""
    fmt, shape = parse_format(name), (3, 301)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).bfloat16()
    message = layout(fmt, *shape, "bf16")
    blocks = CODEC.encode(x, fmt).view(message.blocks, message.block_bytes)
    section = message.section("positions")
    noise = torch.randint(256, (message.blocks, section.payload_bytes), generator=generator, dtype=torch.uint8)
    blocks[:, section.offset : section.offset + section.payload_bytes] = noise
    values, _ = oracle.decode(bytes(blocks.flatten().numpy()), fmt, *shape, "bf16")
    found = CODEC.decode(blocks.flatten(), fmt, shape, x.dtype).values
    assert np.array_equal(found.numpy().view(np.uint32), np.array(values, dtype=np.float32).view(np.uint32))
