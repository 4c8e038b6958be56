"""Models over real ranks (gloo) and the emulator: every reduced tensor, the logits and the counts are the same."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import rank_models
import torch
from rank_group import RankGroup, shared_group
from rank_models import emulated, load_error, real
from shared_evaluations import TASKS, write_tasks

from fc_eval.errors import FcEvalError, LostProcessError
from fc_eval.evaluate.spec import PerplexitySpec, TaskSpec
from fc_eval.models import versions
from fc_eval.models.config import ModelConfig
from fc_eval.models.load import load_model
from fc_eval.models.tiny import byte_tokenizer
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.split import find_split
from fc_eval.tensor_parallel import load_tensor_parallel

COMMS = ["fp32_ordered", "int4", "one_step:int6-g32", "int4_int8"]
# Weights that transformers shards in every way that is covered: name, family, overrides, (W, plan).
MODELS = [
    ("llama", "llama", {}, (2, "full")),
    ("llama_w4", "llama", {}, (4, "full")),
    ("llama_rows", "llama", {}, (3, "row_only")),
    ("biases", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, (2, "full")),
    ("biases_rows", "llama", {"attention_bias": True, "mlp_bias": True}, (6, "row_only")),
    ("qwen2", "qwen2", {}, (4, "full")),
    ("gemma3", "gemma3_text", {"tie_word_embeddings": True}, (2, "full")),
    ("phi3", "phi3", {}, (2, "full")),
]


@pytest.fixture(scope="module")
def saved(family_model, tmp_path_factory):
    """A function (name, family, dtype, overrides) -> configuration of a tiny model in a folder, biases not zero."""
    folders = {}

    def save(name, family="llama", dtype="bfloat16", **overrides) -> ModelConfig:
        if name not in folders:
            model = family_model(family, dtype, **overrides)
            generator = torch.Generator().manual_seed(0)
            for key, value in model.named_parameters():
                if key.endswith("bias"):
                    value.data.copy_(torch.randn(value.shape, generator=generator))
            folders[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(folders[name])
            byte_tokenizer().save_pretrained(folders[name])
        short = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}[dtype]
        return ModelConfig(name, path=str(folders[name]), dtype=short)

    return save


def check_equal(expected, per_rank):
    """Every tensor, every logit and every count, on every rank and under every comm."""
    for rank, found in enumerate(per_rank):
        assert found.keys() == expected.keys()
        for comm, values in expected.items():
            assert len(found[comm]["layers"]) == len(values["layers"]) > 0
            for index, (one, other) in enumerate(zip(found[comm]["layers"], values["layers"], strict=True)):
                assert torch.equal(one, other), (rank, comm, index)
            assert torch.equal(found[comm]["logits"], values["logits"]), (rank, comm)
            assert found[comm]["stats"] == values["stats"], (rank, comm)
    logits = [values["logits"] for values in expected.values()]
    assert not any(torch.equal(logits[0], other) for other in logits[1:])  # the comms do something


@pytest.mark.parametrize(("name", "family", "overrides", "where"), MODELS, ids=[m[0] for m in MODELS])
def test_real_ranks_compute_what_the_emulator_computes(name, family, overrides, where, saved, token_ids, one_thread):
    config, (world_size, plan) = saved(name, family, **overrides), where
    expected = emulated(config, world_size, plan, COMMS, token_ids)
    check_equal(expected, shared_group().run(world_size, real, config, plan, COMMS, token_ids))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_every_dtype_and_with_both_reducers(dtype, saved, token_ids, one_thread):
    config = saved(dtype, "qwen2", dtype)
    expected = emulated(config, 2, "full", COMMS, token_ids)
    for reducer in ("torch", "gathered"):
        check_equal(expected, shared_group().run(2, real, config, "full", COMMS, token_ids, reducer))


def test_one_rank_alone_is_the_whole_model(saved, token_ids, one_thread):
    config = saved("llama")
    (found,) = shared_group().run(1, real, config, "full", ["int4"], token_ids)
    expected = emulated(config, 1, "full", ["int4"], token_ids)
    assert torch.equal(found["int4"]["logits"], expected["int4"]["logits"])
    assert found["int4"]["stats"] == expected["int4"]["stats"]


# -- refused before weights are read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "plan", "family", "overrides", "words"),
    [
        (
            8,
            "full",
            "llama",
            {},
            "tp=8 does not divide the 4 heads of .*k_proj: choose a tp that does .1, 2, 4., or plan=row_only",
        ),
        (
            5,
            "row_only",
            "llama",
            {},
            "tp=5 does not divide model.layers.0.self_attn.o_proj, which has 192 input features",
        ),
        (2, "rows", "llama", {}, "unknown plan 'rows': did you mean 'row_only'"),
        (2, "full", "mixtral", {"num_local_experts": 2}, "mixtures of experts are not covered"),
    ],
)
def test_what_cannot_be_split_is_one_sentence_before_loading(world_size, plan, family, overrides, words, saved):
    config = saved(f"refused_{family}", family, **overrides)
    for kind, text in shared_group().run(world_size, load_error, config, plan):
        assert kind == "FcEvalError", text
        assert re.search(words, text), text
        assert "\n" not in text


def test_a_plan_with_an_unknown_style_is_refused_by_name(saved, family_model):
    model = family_model("llama", "bfloat16")
    plan = model.config.base_model_tp_plan
    try:
        model.config.base_model_tp_plan = plan | {"layers.*.mlp.gate_proj": "diagonal"}
        with pytest.raises(FcEvalError, match="the style 'diagonal' for model"):
            find_split(model, 2, "full")
        assert find_split(model, 2, "row_only").columns == ()
    finally:
        model.config.base_model_tp_plan = plan


def test_device_map_and_missing_gpus_are_refused(saved):
    spread = replace(saved("llama"), device_map="auto")
    ((kind, text), _) = shared_group().run(2, load_error, spread, "full")
    assert (kind, text[:21]) == ("FcEvalError", "model.device_map=auto")


@pytest.mark.parametrize("version", ["4.57.1", "5.15.1", "6.0.0"])
def test_an_unsupported_transformers_is_one_sentence(version, saved, monkeypatch):
    monkeypatch.setattr(versions.transformers, "__version__", version)
    with pytest.raises(
        FcEvalError, match=f"transformers {version} is not supported: expected 5.16 or later, below 6; "
    ):
        load_model(saved("llama"))
    assert '"transformers>=5.16,<6"' in (Path(__file__).parents[1] / "pyproject.toml").read_text()


def test_outside_of_torchrun_is_one_sentence(saved, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(FcEvalError, match="start the script with torchrun --nproc-per-node 2"):
        load_tensor_parallel(saved("llama"), 2, device="cpu")


# -- ranks that differ ---------------------------------------------------------------------------------------------


# Two hashes that are not the same.
DIFFERENT = "is ([0-9a-f]{16}) on rank 1 and (?!\\1)[0-9a-f]{16} on rank 0"


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("data", f"the hash of all inputs {DIFFERENT}"),
        ("mask", f"the hash of all inputs {DIFFERENT}"),
        ("positions", f"the hash of all inputs {DIFFERENT}"),
        ("cache", f"the hash of the cache's history {DIFFERENT}"),
        ("policy", f"the hash of the layers' comms {DIFFERENT}"),
        ("step", r"step is a gathering of facts on rank 1 and forward pass \d+ on rank 0"),
        ("shape", r"the input's shape is \[2, 23\] on rank 1 and \[2, 24\] on rank 0"),
        ("comm", "the comm is two_step:int8-g128-asym on rank 1 and two_step:int4-g128-asym on rank 0"),
    ],
)
def test_ranks_with_different_data_shape_or_comm_are_told_and_go_on(difference, words, saved, token_ids):
    for odd, even in shared_group().run(2, rank_models.differing, saved("llama"), "full", token_ids, difference):
        assert re.search(f"FcEvalError: the ranks do not do the same: {words}; all ranks of", odd), odd
        assert even == "fine"


def test_ranks_that_hold_other_results_are_told(saved, token_ids):
    for said in shared_group().run(2, rank_models.corrupted, saved("llama"), token_ids):
        assert said.startswith("FcEvalError: rank 1 holds other results than rank 0")


def test_a_rank_that_stops_early_is_an_error_of_the_others(saved, token_ids):
    group = RankGroup(world=2, timeout_s=5)
    try:
        group.start(2, rank_models.stop_early, saved("llama"), token_ids)
        fine, error = group.result(0)
        assert not fine
        assert isinstance(error, LostProcessError)
        assert "rank 0 of 2 waited for the others in forward pass 4" in str(error)  # the first two are the self-check
    finally:
        group.close()


# -- evaluations, groups --------------------------------------------------------------------------------------------


def test_perplexity_and_generation_with_a_cache_are_those_of_the_emulator(saved, tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path)
    config = saved("llama")
    text = PerplexitySpec("text", "text", 33, path=str(tmp_path / "own.txt"), limit=3)
    model = load_model(config).model
    for spec in (text, *(TaskSpec(name, str(tmp_path / f"{name}.yaml")) for name in TASKS)):
        with communicate(model, "int4", 2, "reference", "full") as attachment:
            expected = rank_models.evaluated(model, attachment, spec, 3)
        found = shared_group().run(2, rank_models.evaluated_by_ranks, config, "full", "int4", spec)
        assert found == [expected, expected], spec.name
        if spec.name == "sampled":  # two batches: a prompt and then three times one token each
            assert expected["stats"].forwards == 8


def test_several_groups_of_a_larger_world_in_one_process(saved, token_ids, one_thread):
    config = saved("llama")
    expected = [
        emulated(config, 2, "full", [comm], token_ids)[comm]["logits"] for comm in ("int4", "one_step:int6-g32")
    ]
    group = RankGroup(world=4)  # a world of its own, because groups are made by all of its processes
    try:
        for found in group.run(4, rank_models.two_groups, config, token_ids):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    finally:
        group.close()


def test_transformers_own_split_computes_the_same(saved, token_ids):
    """Another implementation: transformers' own tensor parallelism, with the framework's own sums."""
    config = saved("peer", "qwen2", "float32")
    group = RankGroup(world=2)
    try:
        for own, theirs in group.run(2, rank_models.beside_transformers, config, token_ids):
            assert own.shape == theirs.shape
            error = float((own - theirs).norm() / theirs.norm())
            # Its embedding and last projection are split as well, so products are rounded otherwise: a few fp32 steps.
            assert error <= 16 * torch.finfo(torch.float32).eps
    finally:
        group.close()
