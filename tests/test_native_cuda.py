"""The CUDA codec equals the CPU codec bit for bit: on a GPU, and as C++ on a simulated warp where there is none."""

import itertools

import pytest
import torch
from cases import DISTRIBUTIONS, FORMATS, MX_FORMATS, Case, order_sensitive
from native_cases import HIDDEN_SIZES, beside_extremes, require, same_bits, same_round_trip
from simulated_codec import SimulatedCodec, why_not_simulated

from fc_eval.codec import native_ops
from fc_eval.codec.base import DTYPES, RoundTrip
from fc_eval.codec.native import CudaCodec, cpu_codec, cuda_codec
from fc_eval.codec.native_extension import format_ints
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.wire import parse_format
from fc_eval.wire.layout import layout

GROUPS = (8, 16, 32, 64, 128, 256, 512, 1024)
COVERED = [name for name in FORMATS if (row := parse_format(name)).metadata == "extremes" and not row.hadamard]
BASES = [name for name in COVERED if "-g32" in name and not parse_format(name).spikes]
# What tiles of 1024 do not hold: other groups, one per row, spikes, narrow scales.
GENERAL = [name for name in COVERED if CudaCodec.__new__(CudaCodec)._why_not_in_one_pass(parse_format(name))]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "simulated"])
def codec(request):
    require("cpu")
    if request.param == "cuda":
        require("cuda")
        return cuda_codec()
    if reason := why_not_simulated():
        pytest.skip(reason)
    return SimulatedCodec()


def on_device(codec, tensor):
    return tensor.to("cuda" if codec.device_type == "cuda" else "cpu")


def check_case(codec, fmt, x, what):
    reference = cpu_codec()
    there, expected = on_device(codec, x), reference.encode(x, fmt)
    same_bits(codec.encode(there, fmt).cpu(), expected, f"{what}: wire")
    values = reference.round_trip(x, fmt)
    found = codec.round_trip(there, fmt)
    same_round_trip(RoundTrip(found.values.cpu(), found.nonfinite_groups.cpu()), values, f"{what}: round trip")
    found = codec.decode(on_device(codec, expected), fmt, tuple(x.shape), x.dtype)
    same_round_trip(RoundTrip(found.values.cpu(), found.nonfinite_groups.cpu()), values, f"{what}: decoded")


def check_reduce(codec, comm, partials, what):
    expected, counts = cpu_codec().fused_all_reduce(partials, comm)
    values, nonfinite = codec.fused_all_reduce(on_device(codec, partials), comm)
    same_bits(values.cpu(), expected, f"{what}: values")
    assert nonfinite.tolist() == counts.tolist(), what


@pytest.mark.parametrize("name", BASES)
def test_bytes_and_values(codec, name):
    shapes = ((1, 1), (3, 20), (2, 136), (1, 1024), (5, 300), (0, 64))
    cases = zip(itertools.cycle(shapes), itertools.product(DTYPES, DISTRIBUTIONS), itertools.cycle(GROUPS))
    for shape, (dtype, distribution), group in cases:
        case = Case(name, dtype, *shape, distribution)
        check_case(codec, case.fmt.with_group(group), case.values(), f"{case} g{group}")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["int8", "int5", "int4-sym", "int3-se", "int2", "fp8_e4m3"])
def test_whole_tiles(codec, name, group):
    """Contiguous rows whose groups are all full, which the kernels take as one long row."""
    for dtype, distribution in itertools.product(("bf16", "fp32"), DISTRIBUTIONS):
        case = Case(name, dtype, 2, 1536, distribution)
        check_case(codec, case.fmt.with_group(group), case.values(), f"{case} g{group}")


@pytest.mark.parametrize("name", [name for name in MX_FORMATS if parse_format(name).scale_bits == 8])
def test_mx(codec, name):
    for distribution, group in zip(DISTRIBUTIONS, itertools.cycle(GROUPS)):
        case = Case("int4", "bf16", 3, 300, distribution)
        check_case(codec, parse_format(name).with_group(group), case.values(), f"{name} {case} g{group}")


@pytest.mark.parametrize("name", GENERAL)
def test_general_formats(codec, name):
    shapes = ((1, 1), (3, 20), (2, 136), (1, 1024), (4, 300), (0, 64), (2, 1101))
    for shape, (dtype, distribution) in zip(itertools.cycle(shapes), itertools.product(DTYPES, DISTRIBUTIONS)):
        case = Case(name, dtype, *shape, distribution)
        check_case(codec, case.fmt, case.values(), str(case))


@pytest.mark.parametrize("name", ["int2-g32-sr", "int4-g9-se-sr", "mxfp4-g16-e5m0-sr", "int3-gtoken-sr"])
def test_general_formats_of_small_values_and_ties(codec, name):
    """Few different values, zeros of both signs among them: the lowest column decides what is a spike."""
    generator = torch.Generator().manual_seed(0)
    for dtype, count in itertools.product(DTYPES.values(), (2, 3)):
        values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.finfo(dtype).tiny / 4])[:count]
        for rows in (values, torch.cat([values, values[1:] * 2])):
            x = rows[torch.randint(len(rows), (40, 70), generator=generator)].to(dtype)
            check_case(codec, parse_format(name), x, f"{name} {dtype} {rows.tolist()}")


def test_general_messages_that_no_encoder_wrote(codec):
    generator = torch.Generator().manual_seed(0)
    for name in ("int5-g9-se-sr", "int4-g300-sym-sr", "mxint4-g16-e5m0-sr", "int3-gtoken"):
        fmt, shape = parse_format(name), (3, 301)
        message = layout(fmt, *shape, "bf16")
        blocks = cpu_codec().encode(torch.randn(shape, generator=generator).bfloat16(), fmt)
        blocks = blocks.view(message.blocks, message.block_bytes)
        for part in message.sections:
            if part.name.startswith(("plane", "scale", "positions")):
                to = blocks[:, part.offset : part.offset + part.payload_bytes]
                to.copy_(torch.randint(256, to.shape, generator=generator, dtype=torch.uint8))
        wire = blocks.flatten()
        expected = cpu_codec().decode(wire, fmt, shape, torch.bfloat16)
        found = codec.decode(on_device(codec, wire), fmt, shape, torch.bfloat16)
        same_round_trip(RoundTrip(found.values.cpu(), found.nonfinite_groups.cpu()), expected, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-gtoken", "int2-g64-sr", "one_step:int4-g100", "mxfp4-e5m0/int8-g128-sr"])
def test_all_reduce_of_general_formats(name):
    """Not in one pass: the algorithm runs in steps over the codec's round trips."""
    require("cuda")
    partials = Case("int4", "bf16", 5, 1000, "one_outlier").partials(4)
    expected = all_reduce(partials, parse_comm(name), cpu_codec())
    found = all_reduce(partials.cuda(), parse_comm(name), cuda_codec())
    same_bits(found.values.cpu(), expected.values, name)
    assert found.nonfinite_groups.tolist() == expected.nonfinite_groups.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["int8", "int4", "int4-se", "int2-sym", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_every_16_bit_value_beside_extremes(name, dtype):
    require("cuda")
    check_case(cuda_codec(), parse_format(name).with_group(8), beside_extremes(DTYPES[dtype]), name)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_hidden_sizes_of_real_models(codec, hidden):
    for name in ("int4", "int8-g32", "int3-g256-se", "fp8_e4m3-g64"):
        case = Case(name, "bf16", 3, hidden, "one_outlier")
        check_case(codec, case.fmt, case.values(), str(case))


def test_strided_and_unaligned_rows(codec):
    x = Case("int4", "bf16", 6, 2048, "normal").values()
    for view in (x[:, 8:1288], x[:, 3:700], x[::2], x.t()[:300], x[:, 5:6]):
        check_case(codec, parse_format("int4-g32"), view, f"strides {view.stride()}")


COMMS = ["int4", "int8-g32", "int4_int8", "int3-g32-se/fp8_e4m3-g256", "int4-g1024/int4-g32-sym", "one_step:int6-g64"]
COMMS += ["one_step:fp4_e2m1-g32", "fp32_ordered"]


@pytest.mark.parametrize("name", COMMS)
def test_fused_all_reduce(codec, name):
    for index, (dtype, distribution) in enumerate(itertools.product(DTYPES, DISTRIBUTIONS)):
        case = Case(name, dtype, index % 3, 304 + 92 * (index % 2), distribution)
        partials = case.partials(2 + index % 7)
        check_reduce(codec, parse_comm(name), partials, f"{case} W={len(partials)}")


def test_fused_all_reduce_of_mx(codec):
    for name in ("mxfp8_e4m3", "mxfp4-g64/mxfp6_e2m3", "one_step:mxint8"):
        partials = Case("int4", "bf16", 2, 300, "wide").partials(3)
        check_reduce(codec, parse_comm(name), partials, name)


def test_fused_all_reduce_adds_in_rank_order(codec):
    for dtype, name in itertools.product(DTYPES.values(), ("int8", "one_step:int4-g32", "fp32_ordered")):
        check_reduce(codec, parse_comm(name), order_sensitive(8, 2, 64, dtype), f"{name} {dtype}")


def test_fused_all_reduce_of_strided_partials(codec):
    whole = Case("int4", "bf16", 10, 1000, "normal").partials(4)
    for partials in (whole[:, 3:20, 104:680], whole[:, :, 1:301], whole.transpose(0, 1)[:6], whole[::2, ::3]):
        for name in ("int4-g32", "fp32_ordered"):
            check_reduce(codec, parse_comm(name), partials, f"{name} strides {partials.stride()}")


@pytest.mark.gpu
def test_graph_replays_with_new_data():
    require("cuda")
    codec, comm, case = cuda_codec(), parse_comm("int4"), Case("int4", "bf16", 64, 4096, "normal")
    partials = case.partials(4).cuda()
    codec.fused_all_reduce(partials, comm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, nonfinite = codec.fused_all_reduce(partials, comm)
    for distribution in ("wide", "nonfinite", "normal"):
        fresh = Case("int4", "bf16", 64, 4096, distribution).partials(4)
        partials.copy_(fresh)
        graph.replay()
        expected, counts = cpu_codec().fused_all_reduce(fresh, comm)
        same_bits(values.cpu(), expected, distribution)
        assert nonfinite.tolist() == counts.tolist(), distribution


@pytest.mark.gpu
def test_works_on_the_current_stream():
    require("cuda")
    case = Case("int8-g32", "bf16", 512, 4096, "normal")
    x, stream = case.values().cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # the input is changed late, on the same stream
        x.mul_(2)
        found = cuda_codec().round_trip(x, case.fmt)
    stream.synchronize()
    same_bits(found.values.cpu(), cpu_codec().round_trip(case.values() * 2, case.fmt).values, str(case))


@pytest.mark.gpu
def test_more_than_2_to_31_bytes():
    require("cuda")
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    tokens, fmt = 300_000, parse_format("int4")
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    codec, last = cuda_codec(), x[-5:].cpu()
    expected = cpu_codec().round_trip(last, fmt).values
    same_bits(codec.round_trip(x, fmt).values[-5:].cpu(), expected, "round trip")
    wire = codec.encode(x, fmt)
    same_bits(codec.decode(wire, fmt, (tokens, 4096), x.dtype).values[-5:].cpu(), expected, "decoded")


@pytest.mark.gpu
def test_operators_pass_opcheck():
    require("cuda")
    x, fmt = Case("int4", "bf16", 4, 96, "normal").values().cuda(), parse_format("int4-g32")
    ints = list(format_ints(fmt, cuda_codec()._module))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(native_ops.round_trip, (x, ints, ""), test_utils=checks)
    torch.library.opcheck(native_ops.all_reduce, (torch.stack([x, x]), "two_step", ints, ints, ""), test_utils=checks)


def test_uncovered_formats_have_a_reason():
    codec = CudaCodec.__new__(CudaCodec)  # `why_not` needs neither a build nor a device
    device, dtype = torch.device("cuda"), torch.bfloat16
    covered = parse_format("int4-g32")
    assert codec.why_not(covered, dtype, device) is None
    assert codec.why_not_fused(parse_comm("int4-g32"), dtype, device) is None
    for name in ("int4-sfp16", "int4-had"):
        assert codec.why_not(parse_format(name), dtype, device), name
    for name in ("int4-g96", "int4-gtoken", "int4-g4096", "int4-sr", "mxfp4-e5m0"):
        assert codec.why_not(parse_format(name), dtype, device) is None, name
        assert parse_format(name).name in codec.why_not_fused(parse_comm(f"int4-g32/{name}"), dtype, device)
    assert codec.why_not(covered, dtype, torch.device("cpu"))
