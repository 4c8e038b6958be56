"""The fused all-reduce between processes, over cudaIpc or memory of the host: two that share a GPU, or one on each."""

import itertools
import random

import fused_checks
import pytest
import torch
from cases import DISTRIBUTIONS, Case
from native_cases import require, same_bits
from rank_group import RankGroup
from rank_models import real
from test_fused import COMMS
from test_tp_gpu import ARMS, SHAPE

from fc_eval.codec.base import DTYPES
from fc_eval.codec.native import cpu_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.models.config import ModelConfig, TinySpec

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (3, 20), (5, 129), (2, 1024), (1, 1025), (70, 1000), (0, 64), (512, 4096)]


@pytest.fixture(params=["2 on one GPU", "2", "4", "8"])
def gpu_ranks(request):
    """(W, a group of as many processes)."""
    require("cuda")
    world_size, _, shared = request.param.partition(" ")
    count = torch.cuda.device_count()
    if shared and count > 1:
        pytest.skip("ranks share a GPU only where there is one")
    if not shared and count < int(world_size):
        pytest.skip(f"needs {world_size} CUDA devices")
    group = RankGroup(world=int(world_size), device="cuda")
    yield int(world_size), group
    group.close()


def often(calls: int) -> int:
    """Processes that share a GPU take turns on it, so that each call takes a while."""
    return calls if torch.cuda.device_count() > 1 else calls // 100


@pytest.mark.parametrize("reducer", ["fused", "staged"])
def test_ranks_hold_the_emulators_bits(gpu_ranks, reducer):
    world_size, group = gpu_ranks
    draw, shapes = random.Random(0), itertools.cycle(SHAPES)
    cases = [
        (
            name,
            Case(name, draw.choice(list(DTYPES)), *next(shapes), draw.choice(list(DISTRIBUTIONS))).partials(world_size),
        )
        for name in COMMS
    ]
    per_rank = group.run(world_size, fused_checks.every_case, reducer, cases)
    for (name, partials), *found in zip(cases, *per_rank, strict=True):
        expected = all_reduce(partials, parse_comm(name), cpu_codec())
        for rank, (values, _) in enumerate(found):
            same_bits(values, expected.values, f"{name} {tuple(partials.shape)} {partials.dtype}: rank {rank}")
        shares = sum(nonfinite for _, nonfinite in found)
        assert shares.tolist() == expected.nonfinite_groups.tolist(), name


@pytest.mark.parametrize("transport", ["peer", "staged"])
def test_many_calls_with_a_rank_that_is_late_at_times(gpu_ranks, transport):
    world_size, group = gpu_ranks
    assert group.run(world_size, fused_checks.many_calls, transport, often(50_000)) == [0] * world_size


@pytest.mark.parametrize("transport", ["peer", "staged"])
def test_graph_replays_between_processes(gpu_ranks, transport):
    world_size, group = gpu_ranks
    assert group.run(world_size, fused_checks.graph_replays, transport, often(1000)) == [0] * world_size


@pytest.mark.parametrize(
    ("ending", "words"), [("dies", "waited for rank 1 until the deadline"), ("differs", "in a call of another shape")]
)
@pytest.mark.parametrize("transport", ["peer", "staged"])
def test_a_rank_that_dies_or_differs_is_named(gpu_ranks, transport, ending, words):
    world_size, group = gpu_ranks
    group.start(world_size, fused_checks.without_rank_1, transport, ending)
    fine, said = group.result(0)
    assert fine, said
    assert words in said or "was told by rank" in said


def test_a_model_reduced_by_the_kernel_and_by_the_emulator(gpu_ranks):
    world_size, group = gpu_ranks
    if torch.cuda.device_count() < world_size:
        pytest.skip("needs a CUDA device for each rank: the baseline travels over nccl, which wants one")
    config = ModelConfig("random", tiny=TinySpec("llama", 0), shape=SHAPE, dtype="bf16")
    ids = torch.randint(2, 258, (2, 256), generator=torch.Generator().manual_seed(1))
    one, other, staged = (
        group.run(world_size, real, config, "full", ARMS, ids, reducer, "auto", "cuda")
        for reducer in ("fused", "gathered", "staged")
    )
    for found, expected, through_host in zip(one, other, staged, strict=True):
        for arm in ARMS:
            assert torch.equal(found[arm]["logits"], expected[arm]["logits"]), arm
            assert torch.equal(through_host[arm]["logits"], expected[arm]["logits"]), arm
