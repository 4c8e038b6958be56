"""What shows from settings alone is found before anything is computed, and says what the run itself would say."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY_SHAPE, local_config, model_config

from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig, Shape
from fc_eval.models.shape import LLAMA_LIKE, known_shape, shape_of
from fc_eval.parallel.sites import find_sites
from fc_eval.sweep import foresight
from fc_eval.sweep.foresight import check_ahead, llama_sites

ROOT = Path(__file__).parents[1]
TINY = ["model=tiny", "tp=2", "eval=text", "device=cpu"]


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_layers_are_foreseen_as_they_are_found(family_model, family, tmp_path):
    model = family_model(family)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    shape = shape_of(tmp_path / "config.json")
    assert shape is not None
    assert llama_sites(shape) == find_sites(model)


@pytest.mark.parametrize(
    "content",
    [
        *("", "null", "[]", "{", '{"model_type": "mixtral"}', '{"model_type": "llama"}', '{"model_type": ["llama"]}'),
        # what its own configuration fills in is not known here
        '{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, '
        '"num_attention_heads": 4}',
    ],
)
def test_a_config_that_says_nothing_foresees_nothing(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert shape_of(tmp_path / "config.json") is None
    assert known_shape(local_config(tmp_path)) is None


def test_where_sizes_come_from(checkpoint, tmp_path):
    found = known_shape(local_config(checkpoint))
    assert found == replace(TINY_SHAPE, head_dim=24)
    preset = model_config("smollm2")
    assert known_shape(preset) == preset.shape
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    assert known_shape(local_config(gguf)) is None
    assert known_shape(replace(preset, path=str(checkpoint))) == found  # the files at hand, whatever the preset says
    assert known_shape(ModelConfig.from_mapping({"name": "x", "hub_id": "no/such-model"})) is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tp=7"], r"tp=7 does not divide model\.layers\.0\.\S+, which has \d+ input features: choose tp=1, 2"),
        (["policy.rules=[{match: '*.q_proj', comm: int8}]"], r"policy rule 0 \('\*.q_proj'\) matches no row-parallel"),
        (
            ["policy.rules=[{match: '*', comm: int8}, {match: '*.o_proj', comm: int4}]"],
            "policy rule 1 .* has no effect",
        ),
        (["codec=cuda"], "codec=cuda "),
        (["exec=tp", "reducer=fused"], "reducer=fused reduces between GPUs, but device=cpu: use reducer=auto"),
        (["exec=tp", "comm=int4-had"], "int4-g128-asym-had rotates whole rows, and real ranks hold parts of rows"),
    ],
)
def test_mistakes_are_found_without_loading_anything(overrides, words):
    with pytest.raises(FcEvalError, match=words) as caught:
        check_ahead(compose_one([*TINY, *overrides]))
    assert "\n" not in str(caught.value)


def test_a_codec_must_be_installed_and_work_on_the_device(monkeypatch):
    config = compose_one([*TINY, "codec=cpu", "comm=int4"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FcEvalError, match="codec=cpu is not part of this installation"):
        check_ahead(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: foresight)
    check_ahead(config)
    with pytest.raises(FcEvalError, match="codec=cpu works on cpu tensors, but device=cuda"):
        check_ahead(replace(config, device="cuda"))
    check_ahead(compose_one([*TINY, "codec=reference", "comm=int4"]))


@pytest.mark.parametrize(
    "policy", ["uniform", "down_proj_int8", "o_proj_int8", "first_last_int8", "first_last_baseline"]
)
def test_what_is_possible_passes(policy):
    check_ahead(compose_one(["model=smollm2", f"policy={policy}", "tp=4", "eval=text", "device=cpu"]))
    check_ahead(compose_one([*TINY, "tp=1"]))


def test_sizes_are_checked_by_the_widths_of_the_layers():
    wide = Shape(layers=1, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=32)
    assert [(site.kind, site.in_features, site.out_features) for site in llama_sites(wide)] == [
        ("o_proj", 128, 64),
        ("down_proj", 128, 64),
    ]


def test_no_tensor_library_is_loaded():
    code = (
        "import sys; from fc_eval.sweep.foresight import check_ahead; from fc_eval.compose import compose_one;"
        f"check_ahead(compose_one({TINY!r})); sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
