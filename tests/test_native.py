"""The native CPU codec equals the reference byte for byte and bit for bit, on every instruction set of this machine."""

import random

import pytest
import torch
from cases import DISTRIBUTIONS, FORMATS, GROUP_FORMATS, Case, codec_cases, order_sensitive
from native_cases import (
    HIDDEN_SIZES,
    beside_extremes,
    require,
    same_bits,
    same_round_trip,
    section,
)

from fc_eval.codec.base import DTYPE_NAMES, DTYPES
from fc_eval.codec.native import CpuCodec
from fc_eval.codec.native_extension import extension, format_ints, native_status
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.wire import WireFormat, parse_format
from fc_eval.wire.layout import layout

REFERENCE = ReferenceCodec()
COVERED = [name for name in FORMATS if (row := parse_format(name)).metadata == "extremes" and not row.hadamard]
ISAS = ("baseline", "avx2", "avx512")


@pytest.fixture(autouse=True)
def _built():
    require("cpu")


@pytest.fixture(params=ISAS)
def codec(request):
    if request.param not in extension("cpu").instruction_sets():
        pytest.skip(f"this machine has no {request.param}")
    return CpuCodec(request.param)


FLOATS = ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]
MX = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "mxint4-e4m0"]


def check_case(codec: CpuCodec, fmt: WireFormat, x: torch.Tensor, what: str) -> None:
    expected = REFERENCE.encode(x, fmt)
    same_bits(codec.encode(x, fmt), expected, f"{what}: wire")
    values = REFERENCE.round_trip(x, fmt)
    same_round_trip(codec.round_trip(x, fmt), values, f"{what}: round trip")
    same_round_trip(codec.decode(expected, fmt, tuple(x.shape), x.dtype), values, f"{what}: decoded")


@pytest.mark.parametrize("name", COVERED)
def test_bytes_and_values_equal_the_reference(codec, name):
    for case in codec_cases([name]):
        check_case(codec, case.fmt, case.values(), str(case))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["int8", "int4", "int4-sym", "int4-se", "int2", *FLOATS, *MX])
def test_every_16_bit_value_beside_extremes(name, dtype):
    x = beside_extremes(DTYPES[dtype])
    check_case(CpuCodec(), parse_format(name).with_group(8), x, name)
    # Groups of whole chunks of 32 take another way from fp16 to fp32.
    check_case(CpuCodec(), parse_format(name).with_group(32), x[: len(x) // 4 * 4].view(-1, 32), name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_of_every_16_bit_value(codec, dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    others = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
    # Rows of 1000 end in less than a chunk of 32; the product has more bits than the dtype and meets ties.
    partials = torch.stack([every, others, (others.float() * 0.37).to(every.dtype)])[:, :65000].view(3, 65, 1000)
    expected = all_reduce(partials, parse_comm("fp32_ordered"), REFERENCE).values
    same_bits(codec.fused_all_reduce(partials, parse_comm("fp32_ordered"))[0], expected, dtype)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_hidden_sizes_of_real_models(codec, hidden, tokens):
    for name in ("int4", "int8-g32-sym", "int3-gtoken", "fp8_e4m3-g96"):
        case = Case(name, "bf16", tokens, hidden, "one_outlier")
        check_case(codec, case.fmt, case.values(), str(case))


@pytest.mark.parametrize(
    "name", ["int2", "int3", "int5-se", "int6-sym", "int7", "int8", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2", *MX]
)
def test_every_code_decodes_as_in_the_reference(codec, name):
    fmt, shape, generator = parse_format(name).with_group(32), (64, 96), torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).bfloat16()
    wire, message = REFERENCE.encode(x, fmt), layout(fmt, *shape, "bf16")
    for part in message.sections:
        if part.name.startswith(("plane", "scale")):
            plane = section(wire, message, part.name)
            plane.copy_(torch.randint(256, plane.shape, generator=generator, dtype=torch.uint8))
    same_round_trip(codec.decode(wire, fmt, shape, x.dtype), REFERENCE.decode(wire, fmt, shape, x.dtype), name)


def test_many_rows_are_split_among_threads(codec):
    case = Case("int6-g32", "bf16", 700, 1000, "nonfinite")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        check_case(codec, case.fmt, case.values(), str(case))
    finally:
        torch.set_num_threads(before)


def test_strided_rows_and_misaligned_wire(codec):
    x = Case("int4", "bf16", 6, 2048, "normal").values()
    fmt = parse_format("int4-g32")
    for view in (x[:, 100:700], x[::2], x.t()[:300], x[:, 5:6], x[1:4, 3:40]):
        check_case(codec, fmt, view, f"strides {view.stride()}")
    wire = codec.encode(x, fmt)
    shifted = torch.cat([wire.new_zeros(3), wire])[3:]
    same_bits(codec.decode(shifted, fmt, tuple(x.shape), x.dtype).values, codec.round_trip(x, fmt).values, "shifted")


def test_flush_to_zero_of_the_caller_changes_nothing(codec):
    case = Case("int8-g32", "fp32", 5, 300, "subnormal")
    x = case.values()
    expected = REFERENCE.round_trip(x, case.fmt)
    try:
        torch.set_flush_denormal(True)
        found = codec.round_trip(x, case.fmt)
    finally:
        torch.set_flush_denormal(False)
    same_round_trip(found, expected, str(case))


def test_multiply_and_add_round_twice(codec):
    # (2^12 + 1)^2 = 2^24 + 2^13 + 1 loses its last bit when the product is rounded; one rounding (fused) would keep it.
    assert extension("cpu").multiply_add(4097.0, 4097.0, -(2.0**24) - 2.0**13, codec.isa) == 0.0


COMMS = [
    *("int4", "int8", "int4_int8", "int3-g32-se/int5-g96-sym", "fp8_e4m3-g32/int8-gtoken", "one_step:int6-g64"),
    *("one_step:fp4_e2m1-g32", "fp32_ordered", "int2-g4096/fp6_e3m2-g100", "mxfp4/mxfp8_e4m3"),
    *("one_step:mxint8-e5m0", "int2-g64-sr/int4-g32-sr", "one_step:int3-gtoken-sr"),
]


@pytest.mark.parametrize("name", COMMS)
def test_fused_all_reduce_equals_the_reference(codec, name):
    comm = parse_comm(name)
    for index, distribution in enumerate(DISTRIBUTIONS):
        for dtype in DTYPES:
            case = Case(name, dtype, index % 4, 300 + 100 * (index % 3), distribution)
            partials = case.partials(2 + index % 7)
            expected = all_reduce(partials, comm, REFERENCE)
            values, nonfinite = codec.fused_all_reduce(partials, comm)
            same_bits(values, expected.values, f"{case} W={len(partials)}")
            if comm.is_quantized:
                assert nonfinite.tolist() == expected.nonfinite_groups.tolist(), str(case)
            else:
                assert nonfinite.numel() == 0


def test_fused_all_reduce_adds_in_rank_order(codec):
    for dtype in DTYPES.values():
        partials = order_sensitive(8, 2, 64, dtype)
        for name in ("int8", "one_step:int4-g32", "fp32_ordered"):
            expected = all_reduce(partials, parse_comm(name), REFERENCE).values
            same_bits(codec.fused_all_reduce(partials, parse_comm(name))[0], expected, f"{name} {dtype}")


def test_fused_all_reduce_of_strided_partials(codec):
    whole = Case("int4", "bf16", 40, 1000, "normal").partials(4)
    for partials in (whole[:, 3:20, 100:676], whole.transpose(0, 1)[:6], whole[::2, ::3]):
        expected = all_reduce(partials, parse_comm("int4"), REFERENCE).values
        same_bits(codec.fused_all_reduce(partials, parse_comm("int4"))[0], expected, f"strides {partials.stride()}")


def test_a_token_does_not_depend_on_its_neighbours(codec):
    partials = Case("int4", "bf16", 9, 576, "one_outlier").partials(4)
    together, _ = codec.fused_all_reduce(partials, parse_comm("int4"))
    for token in range(9):
        alone, _ = codec.fused_all_reduce(partials[:, token : token + 1], parse_comm("int4"))
        same_bits(alone[0], together[token], f"token {token}")


def test_layout_equals_the_python_one():
    module = extension("cpu")
    formats = [parse_format(name) for name in COVERED + GROUP_FORMATS]
    rng = random.Random(0)
    for fmt in formats:
        for dtype in DTYPES:
            tokens, hidden = rng.randrange(0, 50), rng.randrange(1, 5000)
            expected = layout(fmt, tokens, hidden, dtype)
            found = module.layout(format_ints(fmt, module), tokens, hidden, module.DTYPES[dtype])
            sizes = ("group", "groups_per_row", "groups_per_block", "blocks", "block_bytes")
            assert {s: found.pop(s) for s in sizes} == {s: getattr(expected, s) for s in sizes}, fmt
            assert found == {s.name: s.offset for s in expected.sections}, fmt


def test_status_names_every_part():
    assert set(native_status()) == {"cpu", "cuda"}
    assert native_status()["cpu"] is None
    assert set(DTYPE_NAMES.values()) <= set(extension("cpu").DTYPES)
