"""Names, layout and sizes: a format reads back from its name, sections follow each other, all bits are counted."""

import math
import subprocess
import sys

import oracle
import oracle_floats
import pytest
from cases import FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st

from fc_eval.errors import FcEvalError
from fc_eval.wire import FORMATS as TABLE
from fc_eval.wire import MINIFLOATS, WIRE_VERSION, parse_format
from fc_eval.wire.layout import effective_bits, layout, metadata_bytes, nominal_bits, owned_blocks, plane_widths


@pytest.mark.parametrize("name", [*TABLE, *FORMATS])
def test_a_name_reads_back_as_the_same_format(name):
    assert parse_format(parse_format(name).name) == parse_format(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int9", "unknown format 'int9'"),
        ("int4-g7", "group size 7"),
        ("int4-g4097", "group size 4097"),
        ("int4-gx", "group size 'x'"),
        ("int4-g32-g64", "sets group_size twice"),
        ("int4-symm", "unknown suffix"),
        ("fp8_e4m3-sym", "no integer scheme"),
        ("mxint8-sym", "no integer scheme"),
        ("mxfp4-sfp16", "power-of-two scale: leave out '-sfp16'"),
        ("fp4_e2m1-e8m0", "no power-of-two scale: leave out '-e8m0'"),
        ("mxfp4-e3m0", "unknown suffix"),
        ("int4-zint16", "needs the asymmetric scheme and a rounded scale"),
        ("int4-slog8-zint16", "'-slog8' has a zero point of 8 bits: leave out '-zint16'"),
        ("int4-se-slog8", "'-slog8' has no place for a sign"),
        ("mxfp4-slog8", "power-of-two scale: leave out '-slog8'"),
        ("int4-sym-sfp16-zint16", "needs the asymmetric scheme and a rounded scale"),
    ],
)
def test_an_impossible_name_says_why(name, message):
    with pytest.raises(FcEvalError, match=message):
        parse_format(name)


def test_minifloat_table_follows_from_its_bits():
    """Largest finite value: all ones, but for the Inf and NaN codes of the two 8-bit types."""
    for name, kind in MINIFLOATS.items():
        codes = 2 ** (kind.exponent + kind.mantissa)
        reserved = {"e4m3": 1, "e5m2": 2**kind.mantissa}.get(name, 0)
        largest = oracle_floats.small_value(codes - 1 - reserved, name)
        assert largest == kind.largest
        assert kind.emax == math.floor(math.log2(kind.largest))
        assert kind.bits == int(kind.exponent + kind.mantissa + 1)


@pytest.mark.parametrize("bits", range(2, 9))
def test_planes_hold_all_bits(bits):
    assert sum(plane_widths(bits)) == bits
    assert list(plane_widths(bits)) == oracle.plane_widths(bits)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", FORMATS)
def test_layout_equals_the_oracles_message(name, dtype):
    fmt = parse_format(name)
    for tokens, hidden in ((0, 576), (1, 1), (2, 576), (3, 300)):
        shape = layout(fmt, tokens, hidden, dtype)
        group, per_row, per_block, blocks = oracle.geometry(fmt, tokens, hidden)
        assert (shape.group, shape.groups_per_row, shape.groups_per_block) == (group, per_row, per_block)
        assert shape.blocks == blocks
        ends = [section.offset + section.nbytes for section in shape.sections]
        assert [section.offset for section in shape.sections] == [0, *ends[:-1]]
        assert all(s.nbytes % 16 == 0 and 0 <= s.nbytes - s.payload_bytes < 16 for s in shape.sections)
        assert shape.block_bytes == ends[-1]
        if group <= 300:  # the oracle is slow; larger groups have the same arithmetic
            rows = [[oracle_floats.ZERO] * hidden for _ in range(tokens)]
            assert shape.total_bytes == len(oracle.encode(rows, fmt, dtype))


def test_sections_of_one_format_in_numbers():
    """INT5 g128 in bf16: 1024 codes in planes of 4 and 1 bits, 8 groups with two extremes of 2 bytes."""
    shape = layout(parse_format("int5-g128"), 3, 576, "bf16")
    assert [(s.name, s.offset, s.nbytes) for s in shape.sections] == [
        ("plane4", 0, 512),
        ("plane1", 512, 128),
        ("meta0", 640, 16),
        ("meta1", 656, 16),
    ]
    assert (shape.groups_per_row, shape.groups, shape.blocks, shape.total_bytes) == (5, 15, 2, 2 * 672)
    assert shape.permuted


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("int4", "bf16", 4.25),
        ("int8", "bf16", 8.25),
        ("int4-g32", "bf16", 5.0),
        ("int4-g32-sym", "bf16", 4.5),
        ("int4", "fp32", 4.5),
        ("int4-sfp16-zint16", "fp32", 4.25),
        ("fp8_e4m3", "bf16", 8.125),
        ("mxfp8_e5m2", "bf16", 8.25),
        ("mxfp6_e3m2", "fp32", 6.25),
        ("mxfp4", "bf16", 4.25),
        ("mxfp4-g16-e4m0", "bf16", 4.25),
        ("mxint8-g128", "bf16", 8.125),  # 8 scales of a byte in a section of 16
        ("int2-sr", "bf16", 2.625),
        ("int2-g64-sr", "bf16", 3.25),
        ("int2-g32-slog8-sr", "bf16", 4.0),  # a byte each for scale and zero point beside spikes and positions
        ("int2-g64-slog8-sr", "bf16", 3.0),
        ("int4-g128-slog8", "bf16", 4 + 2 * 16 * 8 / 1024),  # 8 scales of a byte in a section of 16, as the zero points
        ("int2-g32-sr", "fp32", 2 + (4 * 32 + 2 * 8) / 32),
        ("int4-g512-sr", "bf16", 4 + 4 * 16 * 8 / 1024),  # four sections of 16 bytes behind the codes
        ("int4-gtoken", "bf16", 4 + 8 * 32 / 4096),  # two extremes, each in a section of 16 bytes, per row of 4096
    ],
)
def test_nominal_bits(name, dtype, bits):
    fmt = parse_format(name)
    assert nominal_bits(fmt, dtype) == bits
    assert effective_bits(fmt, 1024, 4096, dtype) == bits


def test_padding_counts_in_effective_bits():
    """H = 576 is 4.5 groups of 128: a row is sent as 640 elements."""
    assert effective_bits(parse_format("int4"), 8, 576, "bf16") == 4.25 * 640 / 576


def test_layout_refuses_impossible_messages():
    fmt = parse_format("int4")
    with pytest.raises(FcEvalError, match="-1 x 8"):
        layout(fmt, -1, 8, "bf16")
    with pytest.raises(FcEvalError, match="3 x 0"):
        layout(fmt, 3, 0, "bf16")
    with pytest.raises(FcEvalError, match="fp64"):
        layout(fmt, 3, 8, "fp64")
    assert metadata_bytes(fmt, "bf16") == (2, 2)


@given(blocks=st.integers(0, 10**6), world_size=st.integers(1, 16))
@settings(deadline=None)
def test_owned_blocks_are_a_balanced_partition(blocks, world_size):
    parts = [owned_blocks(blocks, rank, world_size) for rank in range(world_size)]
    assert [block for part in parts for block in (part.start, part.stop)][1:-1] == [
        edge for part in parts[:-1] for edge in (part.stop, part.stop)
    ]
    assert (parts[0].start, parts[-1].stop) == (0, blocks)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_sizes_need_no_tensor_library():
    program = (
        "import sys, fc_eval.wire.layout, fc_eval.collective.comm, fc_eval.collective.traffic\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert WIRE_VERSION == 1
