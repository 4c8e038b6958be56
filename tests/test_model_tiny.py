"""Random models that are not possible: one sentence, whatever transformers raises."""

import pytest
from conftest import TINY_SHAPE

from fc_eval.errors import FcEvalError
from fc_eval.models.config import Shape
from fc_eval.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("shape", "family", "message"),
    [
        (Shape(1, 100, 64, 8, 4), "llama", "hidden size 100 with 8 heads"),
        (Shape(1, 64, 64, 8, 3), "llama", "8 heads and 3 key/value heads"),
        (Shape(1, 190, 64, 10, 5), "llama", r"head size of 19 .* must be even"),
        (Shape(1, 64, 64, 8, 4, head_dim=5), "llama", r"head size of 5 .* must be even"),
        (TINY_SHAPE, "lama", r"unknown model\.tiny\.family 'lama': did you mean 'llama'"),
        (TINY_SHAPE, "", r"unknown model\.tiny\.family '': expected one of gemma3_text, llama, "),
        (TINY_SHAPE, "t5", "no causal language model of this type"),
        (TINY_SHAPE, "vit", "no causal language model of this type"),
        (TINY_SHAPE, "falcon", r"model\.tiny\.family=falcon is not possible: .*head_dim"),
        (TINY_SHAPE, "mamba", "no 'sdpa' attention for it here"),
    ],
)
def test_random_models_that_are_not_possible(shape, family, message):
    with pytest.raises(FcEvalError, match=message) as caught:
        tiny_model(shape, family)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("attention", ["foo", ""])
def test_an_attention_that_is_not_there(attention):
    with pytest.raises(FcEvalError, match=r"set model\.attn_implementation=eager"):
        tiny_model(TINY_SHAPE, attn_implementation=attention)
