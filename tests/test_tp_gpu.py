"""Real ranks on two GPUs over nccl: both reducers and the emulator hold the same bits, and models agree end to end."""

import itertools
import json
import subprocess
from dataclasses import replace

import pytest
import rank_checks
import torch
from cases import COMMS, Case, order_sensitive
from rank_group import RankGroup
from rank_models import emulated, real
from test_collective import DISTRIBUTIONS, codes_of
from test_tp_reduce import SHAPES
from test_tp_run import prepared

from fc_eval.codec.base import DTYPES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.compose import compose_one
from fc_eval.models.config import ModelConfig, Shape, TinySpec
from fc_eval.sweep.child import child_command

pytestmark = pytest.mark.gpu
# Every algorithm that two ranks can run, in formats that the CUDA codec covers and in some that it may not.
NAMES = [name for name, _ in COMMS if "@3" not in name and "-had" not in name]
# Sharded products are large enough for the kernels that real models meet: 16 heads, 8 key/value heads.
SHAPE = Shape(layers=3, hidden=1024, intermediate=2816, heads=16, kv_heads=8)
ARMS = ["fp32_ordered", "int4", "one_step:int6-g32", "int4_int8"]


@pytest.fixture(scope="module")
def two_gpus():
    """Two ranks, one GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    group = RankGroup(world=2, device="cuda")
    yield group
    group.close()


@pytest.mark.parametrize("codec", ["reference", "auto"])
def test_both_reducers_equal_the_emulator(two_gpus, codec):
    shapes = itertools.cycle([*SHAPES, (512, 1024)])
    cases = [
        (name, Case("int4", dtype, *next(shapes), kind).partials(2))
        for name in NAMES
        for dtype in DTYPES
        for kind in DISTRIBUTIONS
    ]
    cases += [(name, order_sensitive(2, 3, 70, torch.float32)) for name in ("int4-g32", "fp32_ordered", "ring:int4")]
    per_rank = two_gpus.run(2, rank_checks.reduce_cases, cases, codec, "cuda")
    for index, (name, partials) in enumerate(cases):
        expected = all_reduce(partials, parse_comm(name), ReferenceCodec())
        found = [answers[index] for answers in per_rank]
        for answer in found:
            for reducer in ("torch", "gathered"):
                what = (name, tuple(partials.shape), partials.dtype, reducer)
                if name == "plain":  # a GPU's own NaN has other bits than a CPU's
                    assert torch.equal(answer[reducer].isnan(), expected.values.isnan()), what
                    assert torch.equal(answer[reducer].nan_to_num(0), expected.values.nan_to_num(0)), what
                else:
                    assert codes_of(answer[reducer]) == codes_of(expected.values), what
            if name != "plain":  # how it travels is the framework's matter
                assert answer["by_stage"] == answer["promised"], name
                assert answer["sent"] == sum(answer["promised"].values())
        for reducer in ("torch", "gathered"):
            shares = sum(answer[f"{reducer}_nonfinite"] for answer in found)
            assert shares.tolist() == expected.nonfinite_groups.tolist(), (name, reducer)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("plan", ["full", "row_only"])
def test_a_model_over_two_gpus(two_gpus, plan, dtype):
    """Reducers agree under both plans; with the emulator on one GPU where that computes rank by rank."""
    config = ModelConfig("random", tiny=TinySpec("llama", 0), shape=SHAPE, dtype=dtype)
    # Enough rows that attention kernels do not cut the keys of a head differently when there are half as many heads.
    ids = torch.randint(2, 258, (4, 1024), generator=torch.Generator().manual_seed(1))
    by_reducer = {
        reducer: two_gpus.run(2, real, config, plan, ARMS, ids, reducer, "auto", "cuda")
        for reducer in ("torch", "gathered")
    }
    results = [found for ranks in by_reducer.values() for found in ranks]
    expected = emulated(config, 2, "full", ARMS, ids, "auto", "cuda") if plan == "full" else results[0]
    for found in results:
        for arm, values in expected.items():
            pairs = zip(found[arm]["layers"], values["layers"], strict=True)
            assert [torch.equal(one, other) for one, other in pairs] == [True] * 2 * SHAPE.layers, arm
            assert torch.equal(found[arm]["logits"], values["logits"]), arm
            assert found[arm]["stats"] == values["stats"], arm


def test_a_run_over_two_gpus_records_what_the_emulator_records(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    settings = ["model=tiny", "tp=2", "device=cuda", "comm=int4", "eval=[text,everyday]", "eval.limit=4", "processes=1"]
    config = compose_one([*settings, "eval.runs.text.window_tokens=64", "exec=tp"])
    folders = [
        prepared(config, tmp_path / "real"),
        prepared(replace(config, exec="emulated", plan="full"), tmp_path / "emulated"),
    ]
    for folder in folders:
        done = subprocess.run(child_command(folder), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (json.loads((folder.path / "result.json").read_text()) for folder in folders)
    assert one["arm"] == two["arm"] | {"exec": "tp", "reducer": "fused"}
    for key in ("results", "wire", "calls"):
        assert one[key] == two[key], key
