"""The fused all-reduce with virtual ranks: the emulator's bits on every rank, and named failures instead of hangs.

The same device code runs on a GPU, and on the CPU with a thread for every warp (cuda_ext/tests/simulated_ranks.h).
"""

import itertools
import random

import pytest
import torch
from cases import DISTRIBUTIONS, Case, order_sensitive
from fused_ranks import check, launch, virtual_ranks
from native_cases import HIDDEN_SIZES, require, same_bits
from simulated_codec import why_not_simulated

from fc_eval.codec.base import DTYPES
from fc_eval.codec.native import cpu_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.errors import FcEvalError, LostProcessError

INTEGERS = [
    f"int{bits}-g{group}{scheme}" for bits in range(2, 9) for group, scheme in ((32, ""), (64, "-sym"), (128, "-se"))
]
FORMATS = [*INTEGERS, "fp8_e4m3-g32", "fp8_e4m3-g128", "mxfp8_e4m3", "mxfp4", "int4-g32", "int4-g128", "int8-g32"]
MIXED = [
    "int4_int8",
    "int4-g32-sym/int8-g32-sym",
    "int3-g64-se/int7-g64-se",
    "mxfp4/mxfp8_e4m3",
    "int2-g1024/int5-g1024",
]
COMMS = [*FORMATS, *(f"one_step:{name}" for name in FORMATS), *MIXED]
# One element, none; short groups; rows that cannot be read 16 bytes at a time; a tile and one element; several rounds.
SHAPES = [(1, 1), (0, 64), (3, 20), (5, 129), (1, 1025), (7, 576), (2, 1024), (70, 1000)]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "simulated"])
def where(request):
    require("cpu")
    if request.param == "cuda":
        require("cuda")
    elif reason := why_not_simulated():
        pytest.skip(reason)
    return request.param


@pytest.fixture
def ranks(where):
    """A function W -> communicator; closed afterwards."""
    made = []

    def make(world_size, **options):
        made.append(virtual_ranks(where, world_size, **options))
        return made[-1]

    yield make
    for communicator in made:
        communicator.close()


def scale(where: str, on_gpu: int, simulated: int) -> int:
    return on_gpu if where == "cuda" else simulated


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_every_rank_holds_the_emulators_bits(where, ranks, world_size):
    """Random comms, shapes, dtypes and values, one after the other on one communicator."""
    draw, communicator = random.Random(world_size), ranks(world_size)
    for _ in range(scale(where, 400, 5)):
        name, shape, blocks = draw.choice(COMMS), draw.choice(SHAPES[: scale(where, 8, 6)]), draw.randint(0, 2)
        case = Case(name, draw.choice(list(DTYPES)), *shape, draw.choice(list(DISTRIBUTIONS)))
        if parse_comm(name).gather and communicator.why_not(parse_comm(name), case.dtype, shape[1]):
            continue
        check(communicator, case.partials(world_size), name, blocks)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_staged_in_memory_of_the_host(where, ranks, world_size):
    communicator = ranks(world_size, staged=True)
    communicator._native.write_patterns()
    assert not any(communicator._native.wrong_patterns())
    for name, shape in itertools.product(("int4-g32", "one_step:int8", "mxfp4"), SHAPES[: scale(where, 8, 6)]):
        check(communicator, Case(name, "bf16", *shape, "normal").partials(world_size), name, blocks=1)


@pytest.mark.parametrize("name", COMMS)
def test_every_comm(where, ranks, name):
    communicator = ranks(2)
    for dtype, distribution in zip(DTYPES, ("normal", "wide", "nonfinite"), strict=True):
        check(communicator, Case(name, dtype, 3, 352, distribution).partials(2), name)


@pytest.mark.parametrize("name", ["int4-g32", "one_step:int4-g32"])
def test_many_rounds_of_one_block(where, ranks, name):
    """Inboxes are used again and again, the last ones not by all warps."""
    partials = Case(name, "bf16", scale(where, 301, 131), 1024, "normal").partials(2)
    check(ranks(2), partials, name, blocks=1)


def test_shapes_and_comms_that_alternate(where, ranks):
    communicator = ranks(3)
    calls = [("int8-g32", 40, 96), ("one_step:int2-g32", 3, 1024), ("int4", 1, 1), ("one_step:int8-g32", 17, 1024)]
    for turn in range(scale(where, 2000, 8)):
        name, tokens, hidden = calls[turn % len(calls)]
        partials = Case(name, "bf16", tokens, hidden, "normal").partials(3)
        check(communicator, partials * (turn + 1), name, blocks=turn % 3)


def test_adds_in_rank_order(where, ranks):
    for world_size in (3, 8)[: scale(where, 2, 1)]:
        communicator = ranks(world_size)
        for dtype, name in itertools.product(DTYPES.values(), ("int8", "one_step:int4-g32")):
            check(communicator, order_sensitive(world_size, 2, 64, dtype), name)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_hidden_sizes_of_real_models(where, ranks, hidden):
    check(ranks(2), Case("int4", "bf16", scale(where, 200, 2), hidden, "one_outlier").partials(2), "int4_int8")


def test_unaligned_rows(where, ranks):
    communicator = ranks(2)
    for elements in (7, 33, 1025):
        check(communicator, Case("int5", "bf16", 1, elements, "normal").partials(2), "int5-g32")


def test_the_same_twice(where, ranks):
    communicator, partials = ranks(2), Case("int4", "fp16", 5, 1024, "wide").partials(2)
    one, other = (launch(communicator, partials, "int4-g32")[0] for _ in range(2))
    same_bits(one, other, "run to run")
    alone = launch(communicator, partials[:, 3:4], "int4-g32")[0]
    same_bits(alone, one[:, 3:4], "a row alone")


@pytest.mark.parametrize("name", ["int4-g32", "one_step:int4-g32"])
def test_data_are_read_before_they_are_replaced(where, ranks, name):
    """One rank pauses between the arrival of data and reading them; without protection the same call goes wrong."""
    communicator = ranks(2)
    if not communicator.module.FUSED_DEBUG:
        pytest.skip("only a debug build (FC_EVAL_FUSED_DEBUG) can make ranks late and take protection away")
    partials = Case(name, "bf16", scale(where, 400, 33), 1024, "normal").partials(2)
    late = {"blocks": 1, "late_rank": 1, "late_s": 0.3 if where == "simulated" else 0.0005}
    check(communicator, partials, name, **late)
    unprotected, _ = launch(communicator, partials, name, **late, unprotected=True)
    expected = all_reduce(partials, parse_comm(name), cpu_codec()).values
    assert not torch.equal(unprotected, expected.expand_as(unprotected))


# -- calls that cannot go on -------------------------------------------------------------------------------------------


def test_a_late_rank_is_a_named_error_and_all_of_the_output_is_nan(where, ranks):
    communicator = ranks(2, deadline_s=0.7)
    if not communicator.module.FUSED_DEBUG:
        pytest.skip("only a debug build (FC_EVAL_FUSED_DEBUG) can make ranks late")
    partials = Case("int4", "bf16", 65, 1024, "normal").partials(2)
    values, _ = launch(communicator, partials, "int4-g32", blocks=1, late_rank=1, late_s=3.5)
    assert values[0].isnan().all()
    with pytest.raises(LostProcessError, match=r"rank 0 waited for rank 1 until the deadline \(slot 0, .*epoch \d+"):
        communicator.check()
    # From now on every call leaves at once, a replay of a graph too, which does not ask the host.
    again, _ = launch(communicator, partials, "int4-g32")
    assert again.isnan().all()
    with pytest.raises(LostProcessError, match="given up and its output is NaN"):
        communicator.all_reduce(partials.to(communicator.device), parse_comm("int4-g32"))


def test_what_is_not_covered_has_a_reason(where, ranks):
    communicator = ranks(2)
    for name, words in (
        ("ring:int4-g32", "ring is not two_step or one_step"),
        ("int4-gtoken", "the group is not a power of two"),
        ("int4-g16", "groups of less than 32"),
        ("int4-g32-sr", "spikes"),
        ("int4-sfp16", "rounded scale"),
        ("mxfp4-e5m0", "scales of other than 8 bits"),
        ("int4-g32/int8-g32-sym", "have different schemes"),
        ("int4-g32/int8-g128", "groups of 32 and 128 in rows of 96"),
    ):
        with pytest.raises(FcEvalError, match=words):
            communicator.all_reduce(torch.zeros(2, 4, 96, device=communicator.device), parse_comm(name))
    with pytest.raises(FcEvalError, match="more blocks than slots"):
        communicator.all_reduce(torch.zeros(2, 4, 96, device=communicator.device), parse_comm("int4"), blocks=1000)
    communicator.close()
    with pytest.raises(FcEvalError, match="closed"):
        communicator.all_reduce(torch.zeros(2, 4, 96, device=communicator.device), parse_comm("int4"))


def test_the_start_up_test_finds_everything_in_place(where, ranks):
    communicator = ranks(3)
    communicator._native.write_patterns()
    assert communicator._native.wrong_patterns() == (0, 0, 0)
    communicator._native.write_patterns()
    check(communicator, Case("int4", "bf16", 3, 300, "normal").partials(3), "int4")


def test_torch_operator(where, ranks):
    communicator, comm = ranks(2), parse_comm("int4-g32")
    partials = Case("int4", "bf16", 3, 96, "nonfinite").partials(2)
    values, nonfinite = communicator.all_reduce(partials.to(communicator.device), comm)
    expected = all_reduce(partials, comm, cpu_codec())
    for found in values.cpu():
        same_bits(found, expected.values, "through the operator")
    assert nonfinite.tolist() == expected.nonfinite_groups.tolist()


# -- on a GPU only -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4", "one_step:int8-g32", "int4_int8"])
def test_graph_replays_with_new_data(name):
    require("cuda")
    communicator, comm = virtual_ranks("cuda", 4), parse_comm(name)
    case = Case(name, "bf16", 64, 4096, "normal")
    partials = case.partials(4).cuda()
    communicator.all_reduce(partials, comm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, _ = communicator.all_reduce(partials, comm)
    generator = torch.Generator(partials.device).manual_seed(0)
    for _ in range(1000):
        partials.normal_(generator=generator)
        graph.replay()
        expected = all_reduce(partials, comm, cpu_codec() if partials.device.type == "cpu" else _cuda_codec()).values
        assert torch.equal(values, expected.expand_as(values))
    communicator.check()
    communicator.close()


@pytest.mark.gpu
def test_two_streams_on_one_communicator_are_an_error():
    """Ranks of the first call wait for each other long enough for the second one to meet it."""
    require("cuda")
    communicator = virtual_ranks("cuda", 2)
    partials = torch.randn(2, 32768, 4096, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            communicator.all_reduce(partials, parse_comm("int4"), blocks=8)
    torch.cuda.synchronize()
    with pytest.raises(FcEvalError, match="another call of it was under way, on a second stream"):
        communicator.check()
    communicator.close()


@pytest.mark.gpu
def test_more_than_2_to_31_bytes():
    require("cuda")
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    communicator, comm = virtual_ranks("cuda", 2), parse_comm("int4")
    partials = torch.randn(2, 300_000, 4096, device="cuda", dtype=torch.bfloat16)
    values, _ = communicator.all_reduce(partials, comm)
    communicator.check()
    expected = all_reduce(partials[:, -50:], comm, _cuda_codec()).values
    assert torch.equal(values[:, -50:], expected.expand(2, 50, 4096))
    communicator.close()


def _cuda_codec():
    from fc_eval.codec.native import cuda_codec

    return cuda_codec()
