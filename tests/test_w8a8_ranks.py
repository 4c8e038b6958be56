"""W8A8 models over real ranks (gloo) and the emulator: the same tensors, logits and counts, bit for bit."""

import os
from typing import Any

import pytest
import torch
from conftest import TINY_SHAPE
from rank_group import shared_group
from rank_models import emulated, real

from fc_eval.models.config import CalibrationSpec, ModelConfig, TinySpec
from fc_eval.models.tiny import byte_tokenizer

COMMS = ["fp32_ordered", "int4"]
SMOOTHED = {"weights": "w8a8", "calibration": CalibrationSpec("text", sequences=2, tokens=32)}
# Family, whether all biases are there and random, W, plan.
MODELS = [
    ("llama", False, 2, "full"),
    ("llama", True, 2, "full"),
    ("llama", True, 3, "row_only"),
    ("qwen2", False, 4, "full"),
    ("gemma3_text", False, 2, "full"),
    ("phi3", False, 2, "full"),
]


def real_alone(ranks: Any, cache: str, *arguments: Any) -> dict[str, dict[str, Any]]:
    """On real ranks that keep what they calibrate in a cache of the test's."""
    os.environ["FC_EVAL_CACHE"] = cache
    return real(ranks, *arguments)


def with_biases(family_model, folder) -> ModelConfig:
    """A checkpoint whose biases are random."""
    model = family_model("llama", "bfloat16", attention_bias=True, mlp_bias=True)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return ModelConfig("biases", path=str(folder), **SMOOTHED)


@pytest.mark.parametrize(("family", "biases", "world_size", "plan"), MODELS)
def test_real_ranks_compute_what_the_emulator_computes(
    family, biases, world_size, plan, family_model, tmp_path, token_ids, monkeypatch, one_thread
):
    config = ModelConfig("tiny", tiny=TinySpec(family), shape=TINY_SHAPE, **SMOOTHED)
    if biases:
        config = with_biases(family_model, tmp_path / "model")
    # Each side calibrates by itself: neither has what the other kept.
    found = shared_group().run(world_size, real_alone, str(tmp_path / "ranks"), config, plan, COMMS, token_ids)
    monkeypatch.setenv("FC_EVAL_CACHE", str(tmp_path / "emulator"))
    expected = emulated(config, world_size, plan, COMMS, token_ids)
    for rank in found:
        for comm in COMMS:
            assert len(rank[comm]["layers"]) == 2 * TINY_SHAPE.layers
            pairs = zip(rank[comm]["layers"], expected[comm]["layers"], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
            assert torch.equal(rank[comm]["logits"], expected[comm]["logits"])
            assert rank[comm]["stats"] == expected[comm]["stats"]
    native = emulated(config.unquantized(), world_size, plan, COMMS[:1], token_ids)
    assert not torch.equal(native[COMMS[0]]["logits"], expected[COMMS[0]]["logits"])
