"""Small models with random weights and a byte-level tokenizer, built in code: nothing is read, nothing is fetched."""

import difflib
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from fc_eval.errors import FcEvalError, unknown
from fc_eval.models.config import Shape
from fc_eval.models.reasons import reason

BOS, EOS = "<s>", "</s>"
MAX_POSITIONS = 8192
# What an unknown family is answered with when no known one is near.
FAMILIES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with one token per byte (256), BOS and EOS; it adds BOS as LLaMA's tokenizer does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS, model_max_length=MAX_POSITIONS
    )


def tiny_model(
    shape: Shape,
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    **overrides: Any,
) -> PreTrainedModel:
    """A causal language model of a transformers `family` ('llama', 'qwen3', 'gemma3_text', ...) with random weights.

    Weights are drawn on the CPU in fp32 from `seed`, so that they are the same on every device and in every dtype up
    to rounding; the caller's random state stays as it was. `overrides` go to the family's config.

    Raises:
        FcEvalError: transformers knows no such family, or the shape is not possible for it.
    """
    if (shape.head_dim is None and shape.hidden % shape.heads) or shape.heads % shape.kv_heads:
        raise FcEvalError(
            f"a model of hidden size {shape.hidden} with {shape.heads} heads and {shape.kv_heads} key/value heads is "
            "not possible: each must be a multiple of the next"
        )
    head_dim = shape.head_dim or shape.hidden // shape.heads
    if head_dim % 2:
        raise FcEvalError(
            f"a head size of {head_dim} (model.shape) is not possible: rotary position embeddings turn pairs of "
            "values, so it must be even"
        )
    values: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        # Outputs of about the size of the inputs, so that a layer's error shows in the logits.
        "initializer_range": shape.hidden**-0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family not in CONFIG_MAPPING:
        near = difflib.get_close_matches(family, list(CONFIG_MAPPING), n=3, cutoff=0.5)
        raise unknown("model.tiny.family", family, near or FAMILIES, hint="a model type of transformers")
    try:
        config = AutoConfig.for_model(family, **(values | overrides))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attn_implementation
            )
    except Exception as error:  # some families have no causal language model, others refuse a size: no common type
        raise FcEvalError(
            f"a tiny model of model.tiny.family={family} is not possible: {reason(error, attn_implementation)}"
        ) from None
    return model.to(dtype).requires_grad_(False).eval()
