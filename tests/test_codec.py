"""The reference codec equals the oracle byte for byte; what it promises about groups, rows, NaN and errors."""

import numpy as np
import oracle
import oracle_floats
import oracle_numpy
import pytest
import torch
from cases import FORMATS, NARROW_FLOATS, Case, codec_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from fc_eval.codec.base import DTYPES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.errors import FcEvalError
from fc_eval.wire import parse_format
from fc_eval.wire.layout import layout

CODEC = ReferenceCodec()
CANONICAL_NAN = 0x7FC00000


def rows_of(x: torch.Tensor) -> oracle.Rows:
    return [list(row) for row in x.float().numpy()]


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.numpy().view(np.uint32)


def assert_equals_oracle(x: torch.Tensor, fmt, dtype_name: str, case: object) -> None:
    wire = CODEC.encode(x, fmt)
    expected = oracle.encode(rows_of(x), fmt, dtype_name)
    if bytes(wire.numpy()) != expected:
        first = next(i for i, (a, b) in enumerate(zip(wire.tolist(), expected, strict=True)) if a != b)
        pytest.fail(f"{case}: byte {first} of {len(expected)} is {wire[first]:#x}, expected {expected[first]:#x}")
    values, broken = oracle.decode(expected, fmt, *x.shape, dtype_name)
    want = np.array(values, dtype=np.float32).reshape(x.shape).view(np.uint32)
    for how, got in (
        ("decode", CODEC.decode(wire, fmt, tuple(x.shape), x.dtype)),
        ("round_trip", CODEC.round_trip(x, fmt)),
    ):
        assert got.nonfinite_groups.item() == broken, (case, how)
        different = np.argwhere(bits_of(got.values) != want)
        assert not len(different), (
            case,
            how,
            different[0],
            got.values[tuple(different[0])],
            values[different[0][0]][different[0][1]],
        )


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_and_values_equal_the_oracle(name):
    for case in codec_cases([name]):
        assert_equals_oracle(case.values(), case.fmt, case.dtype_name, case)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_bit_pattern_equals_the_oracle(data):
    """Arbitrary bits, NaN payloads and all; arbitrary shapes and formats."""
    fmt = parse_format(data.draw(st.sampled_from(FORMATS)))
    dtype_name = data.draw(st.sampled_from(sorted(DTYPES)))
    tokens, hidden = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 70))
    size = oracle_floats.WIDTH[dtype_name]
    raw = data.draw(st.binary(min_size=size * tokens * hidden, max_size=size * tokens * hidden))
    integers = np.frombuffer(raw, np.int16 if size == 2 else np.int32).reshape(tokens, hidden).copy()
    assert_equals_oracle(torch.from_numpy(integers).view(DTYPES[dtype_name]), fmt, dtype_name, (fmt.name, dtype_name))


# Group extremes for the exhaustive test, as powers and fractions of the dtype's range: subnormal to the top.
FRACTIONS = (1.0, 1.5, 1.984375, 1.0078125)
LOW_PARTS = (-1.0, -0.3330078125, 0.0, 0.5)


def every_value_between(low: float, high: float, dtype: torch.dtype) -> np.ndarray:
    """Groups [n, 4096] that together hold every finite value of a 16-bit dtype in [low, high], each with both ends."""
    everything = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    inside = everything[(everything >= low) & (everything <= high)].numpy()
    body = np.full((-(-len(inside) // 4094), 4094), low, dtype=np.float32)
    body.reshape(-1)[: len(inside)] = inside
    ends = np.broadcast_to(np.array([low, high], dtype=np.float32), (len(body), 2))
    return np.concatenate([ends, body], axis=1)


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int5", "int6", "int7", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_integers(dtype, name):
    for scheme in ("asym", "sym", "se"):
        exhaust(dtype, f"{name}-g4096-{scheme}")


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", *NARROW_FLOATS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_minifloats(dtype, name):
    exhaust(dtype, f"{name}-g4096")


@pytest.mark.parametrize(
    "name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "mxfp4-e4m0", "mxint4-e5m0"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_mx(dtype, name):
    exhaust(dtype, f"{name}-g4096")


def exhaust(dtype: torch.dtype, name: str) -> None:
    fmt, info = parse_format(name), torch.finfo(dtype)
    exponents = (
        (-24, -20, -15, -14, -8, -1, 0, 3, 15) if dtype == torch.float16 else (-133, -127, -126, -60, -1, 0, 7, 127)
    )
    for exponent in exponents:
        for fraction in FRACTIONS:
            high = torch.tensor(fraction * 2.0**exponent, dtype=torch.float64).to(dtype).float().item()
            for part in LOW_PARTS:
                low = torch.tensor(high * part).to(dtype).float().item()
                if high > info.max or high == low:
                    continue
                groups = every_value_between(low, high, dtype)
                x = torch.from_numpy(groups).to(dtype)
                want = oracle_numpy.round_trip(groups, fmt)
                want[np.isnan(want)] = np.nan
                assert np.array_equal(bits_of(CODEC.round_trip(x, fmt).values), want.view(np.uint32)), (name, low, high)


@pytest.mark.parametrize(
    "name",
    [
        "int4-g32",
        "int7-g9-sym",
        "int5-g32-se",
        "int8-sfp16-zint16",
        "fp6_e3m2-g32",
        "fp4_e2m1",
        "mxfp8_e4m3",
        "mxint5-e6m0",
    ],
)
@pytest.mark.parametrize("dtype_name", sorted(DTYPES))
def test_every_code_decodes(name, dtype_name):
    """Planes full of random bits: codes need not be ones that the encoder would choose."""
    fmt, dtype = parse_format(name), DTYPES[dtype_name]
    x = torch.randn(2, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    shape = layout(fmt, 2, 700, dtype_name)
    blocks = CODEC.encode(x, fmt).view(shape.blocks, shape.block_bytes)
    planes = [section for section in shape.sections if section.name.startswith(("plane", "scale"))]
    for section in planes:
        blocks[:, section.offset : section.offset + section.payload_bytes] = torch.randint(
            256, (shape.blocks, section.payload_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
    want, _ = oracle.decode(bytes(blocks.flatten().numpy()), fmt, 2, 700, dtype_name)
    got = CODEC.decode(blocks.flatten(), fmt, (2, 700), dtype).values
    assert np.array_equal(bits_of(got), np.array(want, dtype=np.float32).view(np.uint32))


@given(name=st.sampled_from(FORMATS), tokens=st.integers(1, 6), hidden=st.integers(1, 600), seed=st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(name, tokens, hidden, seed):
    fmt = parse_format(name)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    alone = torch.cat([CODEC.round_trip(row.unsqueeze(0), fmt).values for row in x])
    assert torch.equal(CODEC.round_trip(x, fmt).values, alone)
    assert torch.equal(CODEC.decode(CODEC.encode(x, fmt), fmt, (tokens, hidden), x.dtype).values, alone)


@pytest.mark.parametrize("name", ["int4-g32", "int3-g100", "int6-gtoken-sym", "fp8_e4m3"])
def test_strides_do_not_matter(name):
    fmt = parse_format(name)
    wide = torch.randn(300, 14, generator=torch.Generator().manual_seed(3)).bfloat16()
    x = wide.t()[::2]
    before = x.clone()
    assert not x.is_contiguous()
    assert torch.equal(CODEC.encode(x, fmt), CODEC.encode(x.contiguous(), fmt))
    assert torch.equal(CODEC.round_trip(x, fmt).values, CODEC.round_trip(x.contiguous(), fmt).values)
    assert torch.equal(x, before)
    padded = torch.cat([torch.zeros(3, dtype=torch.uint8), CODEC.encode(x, fmt)])
    assert torch.equal(CODEC.decode(padded[3:], fmt, (7, 300), x.dtype).values, CODEC.round_trip(x, fmt).values)


@pytest.mark.parametrize("name", ["int8-g32", "int5-g100-sym", "int4", "int2-g32-se", "int3-sfp32"])
@pytest.mark.parametrize("dtype_name", sorted(DTYPES))
def test_error_is_at_most_half_a_step(name, dtype_name):
    """Signed-extreme alone clips: its positive end is one step short."""
    case = Case(name, dtype_name, 16, 300, "normal")
    x = case.values().float()
    group = case.fmt.group_size
    for start in range(0, 300, group):
        part = x[:, start : start + group]
        b, scheme = case.fmt.bits, case.fmt.scheme
        extent = part.amax(1) - part.amin(1) if scheme == "asym" else part.abs().amax(1)
        step = extent / {"asym": 2**b - 1, "sym": 2 ** (b - 1) - 1, "se": 2 ** (b - 1)}[scheme]
        error = (CODEC.round_trip(part.to(case.dtype), case.fmt).values - part).abs().amax(1)
        allowed = 1.0 if scheme == "se" else 0.5
        assert (error <= allowed * step + 2**-20 * part.abs().amax(1)).all()  # 2^-20: a few fp32 roundings of s and x


def test_a_constant_group_is_exact():
    """Asymmetric extremes are the values themselves."""
    for dtype in DTYPES.values():
        x = torch.tensor([[3.14159], [-1e-30], [65000.0]]).expand(3, 130).to(dtype)
        assert torch.equal(CODEC.round_trip(x, parse_format("int2")).values, x.float())


def test_a_broken_group_leaves_the_others_alone():
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = float("inf"), -float("nan")
    result = CODEC.round_trip(x, parse_format("int4-g32"))
    assert result.nonfinite_groups.item() == 2
    broken = torch.zeros(2, 64, dtype=torch.bool)
    broken[0, :32] = broken[1, 32:] = True
    assert torch.equal(result.values.isnan(), broken)
    assert (result.values.view(torch.int32)[broken] == CANONICAL_NAN).all()


def test_a_range_that_overflows_is_broken_in_asym_only():
    x = torch.tensor([[3e38, -3e38, 0.0, 1.0]])
    assert CODEC.round_trip(x, parse_format("int8-asym")).values.isnan().all()
    assert CODEC.round_trip(x, parse_format("int8-sym")).values.isfinite().all()


def test_no_tokens_give_no_bytes():
    x = torch.empty(0, 576, dtype=torch.bfloat16)
    wire = CODEC.encode(x, parse_format("int6"))
    assert wire.shape == (0,)
    assert CODEC.decode(wire, parse_format("int6"), (0, 576), x.dtype).values.shape == (0, 576)
    assert CODEC.round_trip(x, parse_format("int6")).values.shape == (0, 576)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CODEC.encode(torch.zeros(4), parse_format("int4")), r"shape \[4\]"),
        (lambda: CODEC.round_trip(torch.zeros(1, 2, 3), parse_format("int4")), r"shape \[1, 2, 3\]"),
        (
            lambda: CODEC.encode(torch.zeros(2, 3, dtype=torch.float64), parse_format("int4")),
            "torch.float64 is not bf16",
        ),
        (
            lambda: CODEC.encode(torch.zeros(1, 65537), parse_format("int4-gtoken-sr")),
            "row of 65537 values",
        ),
        (
            lambda: CODEC.decode(torch.zeros(7, dtype=torch.uint8), parse_format("int4"), (2, 3), torch.float32),
            "are 7 of",
        ),
        (lambda: CODEC.decode(torch.zeros(576), parse_format("int4"), (2, 3), torch.float32), "of torch.float32"),
        (lambda: CODEC.decode(torch.zeros(0, dtype=torch.uint8), parse_format("int4"), (2, 3), torch.int8), "int8"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(FcEvalError, match=message):
        call()
