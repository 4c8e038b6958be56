"""The fused all-reduce between processes, over cudaIpc or memory of the host: two on one GPU, one on each of two."""

import itertools
import random

import pytest
import rank_checks
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


@pytest.fixture(params=["one GPU", "two GPUs"])
def two_ranks(request):
    require("cuda")
    if request.param == "two GPUs" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    if request.param == "one GPU" and torch.cuda.device_count() > 1:
        pytest.skip("ranks share a GPU only where there is one")
    group = RankGroup(world=2, device="cuda")
    yield group
    group.close()


@pytest.mark.parametrize("reducer", ["fused", "staged"])
def test_ranks_hold_the_emulators_bits(two_ranks, reducer):
    draw, shapes = random.Random(0), itertools.cycle(SHAPES)
    cases = [
        (name, Case(name, draw.choice(list(DTYPES)), *next(shapes), draw.choice(list(DISTRIBUTIONS))).partials(2))
        for name in COMMS
    ]
    per_rank = two_ranks.run(2, rank_checks.fused_cases, reducer, cases)
    for (name, partials), *found in zip(cases, *per_rank, strict=True):
        expected = all_reduce(partials, parse_comm(name), cpu_codec())
        for rank, (values, _) in enumerate(found):
            same_bits(values, expected.values, f"{name} {tuple(partials.shape)} {partials.dtype}: rank {rank}")
        shares = sum(nonfinite for _, nonfinite in found)
        assert shares.tolist() == expected.nonfinite_groups.tolist(), name


@pytest.mark.parametrize(
    ("ending", "words"), [("dies", "waited for rank 1 until the deadline"), ("differs", "in a call of another shape")]
)
@pytest.mark.parametrize("transport", ["peer", "staged"])
def test_a_rank_that_dies_or_differs_is_named(two_ranks, transport, ending, words):
    two_ranks.start(2, rank_checks.fused_without_rank_1, transport, ending)
    fine, said = two_ranks.result(0)
    assert fine, said
    assert words in said or ("was told by rank 1" in said and ending == "differs")


def test_a_model_reduced_by_the_kernel_and_by_the_emulator(two_ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: the baseline travels over nccl, which wants one for each rank")
    config = ModelConfig("random", tiny=TinySpec("llama", 0), shape=SHAPE, dtype="bf16")
    ids = torch.randint(2, 258, (2, 256), generator=torch.Generator().manual_seed(1))
    one, other = (
        two_ranks.run(2, real, config, "full", ARMS, ids, reducer, "auto", "cuda") for reducer in ("fused", "gathered")
    )
    for found, expected in zip(one, other, strict=True):
        for arm in ARMS:
            assert torch.equal(found[arm]["logits"], expected[arm]["logits"]), arm
