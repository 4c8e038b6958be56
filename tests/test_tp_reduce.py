"""All-reduce between real ranks over gloo: the emulator's bits, and exactly the bytes that it says.

Partial sums of all ranks are made here; the ranks reduce them with both reducers, and what they hold is compared with
the emulator in this process.
"""

import itertools
import re
from types import SimpleNamespace

import pytest
import rank_checks
import torch
from cases import COMMS, FORMATS, Case, order_sensitive
from rank_group import RankGroup, shared_group
from test_collective import DISTRIBUTIONS, codes_of

from fc_eval.codec.base import DTYPES
from fc_eval.codec.native_extension import native_status
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.codec.select import codecs_available
from fc_eval.collective import distributed
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.collective.reducers import AutoReducer
from fc_eval.errors import FcEvalError, LostProcessError
from fc_eval.wire.format import parse_format

CODEC = ReferenceCodec()
# A message of several blocks with borders inside of rows; fewer blocks than ranks; a row of many blocks; no row.
SHAPES = [(9, 300), (2, 130), (3, 1100), (1, 1), (0, 70), (17, 96)]


def check(world_size: int, cases: list[tuple[str, torch.Tensor]], codec: str = "reference") -> None:
    """Reduces on real ranks and compares every bit, count and byte with the emulator."""
    per_rank = shared_group().run(world_size, rank_checks.reduce_cases, cases, codec)
    for index, (name, partials) in enumerate(cases):
        expected = all_reduce(partials, parse_comm(name), CODEC)
        found = [answers[index] for answers in per_rank]
        what = (name, tuple(partials.shape), partials.dtype)
        for rank, answer in enumerate(found):
            for reducer in ("torch", "gathered"):
                if (reducer, name) == ("torch", "plain") and world_size > 2:
                    continue  # the framework adds in an order of its own
                assert answer[reducer].dtype == expected.values.dtype
                assert codes_of(answer[reducer]) == codes_of(expected.values), (*what, rank, reducer)
            assert codes_of(answer["torch"]) == codes_of(found[0]["torch"])
            if name != "plain":  # how it travels is the framework's matter
                assert answer["by_stage"] == answer["promised"], (*what, rank)
                assert answer["sent"] == sum(answer["promised"].values())
        for reducer in ("torch", "gathered"):
            shares = sum(answer[f"{reducer}_nonfinite"] for answer in found)
            assert shares.tolist() == expected.nonfinite_groups.tolist(), (*what, reducer)


@pytest.mark.parametrize("dtype_name", sorted(DTYPES))
@pytest.mark.parametrize(("name", "world_size"), [case for case in COMMS if "had" not in case[0]])
def test_every_algorithm_equals_the_emulator(name, world_size, dtype_name):
    shapes = itertools.cycle(SHAPES)
    check(
        world_size,
        [(name, Case("int4", dtype_name, *next(shapes), kind).partials(world_size)) for kind in DISTRIBUTIONS],
    )


def test_every_format_of_the_reference_equals_the_emulator():
    """Two-step with the format in both stages, and each in one more way, by turns."""
    others = itertools.cycle(("{}/int8-g48", "one_step:{}", "ring:{}", "hierarchical@3:{}"))
    # The lengths of these are odd, and that of the ways is a power of two: every way meets every shape, kind and dtype.
    lists = [*SHAPES, (5, 257)], DISTRIBUTIONS, ("bf16", "fp32", "fp16")
    assert all(len(each) % 2 for each in lists)
    shapes, kinds, dtypes = map(itertools.cycle, lists)
    cases = []
    for fmt in (name for name in FORMATS if not parse_format(name).hadamard):  # rotation exists in emulation only
        for comm in (f"{fmt}/{fmt}", next(others).format(fmt)):
            cases.append((comm, Case("int4", next(dtypes), *next(shapes), next(kinds)).partials(3)))
    assert len({comm for comm, _ in cases}) == len(cases) > 200
    check(3, cases)


@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_sums_are_in_rank_order(world_size):
    names = ["int4-g32", "one_step:int8", "fp32_ordered", "ring:int4-g32", f"hierarchical@{world_size}:int8"]
    check(world_size, [(n, order_sensitive(world_size, 3, 70, dtype)) for n in names for dtype in DTYPES.values()])


def test_one_rank_is_the_identity():
    check(1, [(name, Case("int4", "bf16", 3, 70, "nonfinite").partials(1)) for name in ("int4", "ring:int4", "plain")])


def test_columns_of_a_larger_tensor_are_reduced_like_a_copy():
    partials = Case("int4", "bf16", 9, 300, "normal").partials(3)
    strided = torch.stack([partials, partials], dim=-1)[..., 0]
    assert not strided[0].is_contiguous()
    check(3, [("int4-g32", strided), ("one_step:int4-g32", strided), ("fp32_ordered", strided)])


def test_native_codec_between_ranks():
    if reason := codecs_available()["cpu"]:
        pytest.skip(f"the native codec is not here: {reason}")
    shapes = itertools.cycle(SHAPES)
    names = [
        "int4",
        "int4-g32/int8",
        "int3-g64-sym/int8-g128",
        "one_step:int6-g32",
        "ring:int5-g32",
        "hierarchical@2:int4",
    ]
    names += ["fp8_e4m3-g32", "mxfp4/mxfp8_e4m3"]
    check(
        4, [(name, Case("int4", d, *next(shapes), "nonfinite").partials(4)) for name in names for d in DTYPES], "auto"
    )


def test_rotated_rows_are_refused_by_name():
    comm = Comm("two_step", parse_format("int4"), parse_format("int4-had"))
    with pytest.raises(FcEvalError, match="rotation exists in emulation only"):
        distributed.all_reduce(torch.zeros(4, 64), comm, CODEC, SimpleNamespace(world_size=2))


class Covers:
    """A fused reducer that covers INT4 alone."""

    name = "fused"

    def why_not(self, partial_TH, comm):
        return None if comm == parse_comm("int4") else "it is not INT4"

    def __call__(self, partial_TH, comm, codec):
        return "fused"

    def check(self):
        raise LostProcessError("a rank is gone")


def test_auto_takes_the_fused_kernel_where_it_covers_a_comm_and_says_the_rest_once(capsys, monkeypatch):
    auto = AutoReducer(SimpleNamespace(rank=0), Covers())
    monkeypatch.setattr(auto, "_wire", lambda partial_TH, comm, codec: "torch")
    found = [auto(torch.zeros(2, 64), parse_comm(name), CODEC) for name in ("int4", "int3", "int4", "int3")]
    assert found == ["fused", "torch", "fused", "torch"]
    name = parse_comm("int3").name
    said = capsys.readouterr().err
    assert said == f"reducer=auto: torch reduces {name}, the fused kernel does not cover it: it is not INT4\n"
    assert auto.name == f"fused, torch for {name}"
    with pytest.raises(LostProcessError):
        auto.check()


def test_auto_is_torch_on_cpus():
    assert shared_group().run(2, rank_checks.named_reducer, "auto") == ["torch"] * 2


def test_the_fused_reducer_says_why_it_cannot_work_here():
    with pytest.raises(FcEvalError, match="unknown reducer 'fusd': did you mean 'fused'"):
        shared_group().run(2, rank_checks.named_reducer, "fusd")
    if reason := native_status()["cuda"]:
        said = f"reducer=fused cannot work here, there is nothing to work with: rank 0: {reason}; use reducer=torch"
        with pytest.raises(FcEvalError, match=re.escape(said)):
            shared_group().run(2, rank_checks.named_reducer, "fused")


@pytest.mark.parametrize("difference", ["facts", "step"])
def test_ranks_that_differ_are_told_apart_and_go_on(difference):
    said = shared_group().run(3, rank_checks.disagree, difference)
    assert len(set(said)) == 1
    expected = {
        "facts": "the ranks do not do the same: shape is [2, 25] on rank 1 and [2, 24] on rank 0",
        "step": "the ranks do not do the same: step is forward pass 7 on rank 2 and forward pass 6 on rank 0",
    }
    assert said[0].startswith(expected[difference])
    check(3, [("int4-g32", Case("int4", "bf16", 3, 70, "normal").partials(3))])


@pytest.mark.parametrize("ending", ["dies", "is late"])
def test_a_rank_that_dies_or_is_late_is_an_error_of_the_others(ending):
    group = RankGroup(world=3, timeout_s=3)
    try:
        group.start(3, rank_checks.lose_rank_1, ending)
        for rank in (0, 2):
            fine, error = group.result(rank)
            assert not fine
            assert isinstance(error, LostProcessError)
            assert f"rank {rank} of 3 waited for the others in forward pass 1, and one of them has ended" in str(error)
    finally:
        group.close()
