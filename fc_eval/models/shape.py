"""Sizes of a model as far as they are known without loading it: from its preset, or from a config.json on disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig, Shape, model_path
from fc_eval.settings import build

# Model types whose row-parallel layers are LLaMA's: layers.N.self_attn.o_proj and layers.N.mlp.down_proj.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
# Types whose head size is not hidden / heads where their config.json does not state it.
_OWN_HEAD_DIM = ("qwen3", "gemma", "gemma2", "gemma3_text")
_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def known_shape(model: ModelConfig) -> Shape | None:
    """The sizes of a model whose layers are named as LLaMA's, None for another or where they are not known.

    Raises:
        FcEvalError: `model.path` names nothing that is there.
    """
    if model.tiny is not None:
        return model.shape if model.tiny.family in LLAMA_LIKE else None
    path = model_path(model)
    if path is not None and path.is_dir():
        return shape_of(path / "config.json")
    if model.shape is not None or model.hub_id is None:
        return model.shape
    from huggingface_hub import try_to_load_from_cache  # takes a second, and most models need it not

    cached = try_to_load_from_cache(model.hub_id, "config.json", revision=model.revision)
    return shape_of(Path(cached)) if isinstance(cached, str) else None


def shape_of(file: Path) -> Shape | None:
    """The sizes that a config.json states; None where it is another model's, or for a loader to complain of."""
    try:
        settings: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, Mapping) or settings.get("model_type") not in LLAMA_LIKE:
            return None
        sizes = {name: settings[key] for name, key in _KEYS.items() if settings.get(key) is not None}
        if "head_dim" not in sizes and settings["model_type"] in _OWN_HEAD_DIM:
            return None
        return build("model.shape", Shape, {"kv_heads": sizes.get("heads")} | sizes)
    except (OSError, ValueError, FcEvalError):
        return None
