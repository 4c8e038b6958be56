"""Row-parallel layers come from the model's own plan; what cannot be split is refused by name."""

import pytest
import torch
from torch import nn

from fc_eval.errors import FcEvalError
from fc_eval.models.config import Shape
from fc_eval.models.tiny import tiny_model
from fc_eval.parallel.site import Site, check_world_size
from fc_eval.parallel.sites import find_sites

DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"]


@pytest.mark.parametrize("family", DENSE)
def test_dense_families_have_two_sites_per_layer_in_order(family_model, family):
    assert find_sites(family_model(family)) == tuple(
        Site(f"model.layers.{layer}.{part}", part.rpartition(".")[2], layer, width, 192)
        for layer in (0, 1)
        for part, width in (("self_attn.o_proj", 192), ("mlp.down_proj", 384))
    )


def test_names_do_not_matter_only_the_plan_does(family_model):
    assert [site.kind for site in find_sites(family_model("gpt_neox"))] == ["dense", "dense_4h_to_h"] * 2


def test_base_model_without_a_head(family_model):
    assert find_sites(family_model().model)[0].name == "layers.0.self_attn.o_proj"


def test_heads_wider_than_the_hidden_size():
    model = tiny_model(Shape(1, 64, 128, heads=2, kv_heads=1, head_dim=64), "gemma3_text")
    assert [(s.in_features, s.out_features) for s in find_sites(model)] == [(128, 64), (128, 64)]


def test_text_decoder_of_a_multimodal_wrapper():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config=sizes | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 262208},
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
    )
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(config)
    assert [site.name for site in find_sites(model)] == [
        "model.language_model.layers.0.self_attn.o_proj",
        "model.language_model.layers.0.mlp.down_proj",
    ]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_refused(family_model, family):
    with pytest.raises(FcEvalError, match=r"^model\.layers\.0\.mlp\.experts .* mixtures of experts are not covered"):
        find_sites(family_model(family))


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_model_without_a_plan_is_refused(family_model, family):
    with pytest.raises(FcEvalError, match="no tensor-parallel plan"):
        find_sites(family_model(family))


def test_an_emptied_plan_is_refused(family_model, monkeypatch):
    model = family_model()
    monkeypatch.setattr(model.config, "base_model_tp_plan", {"layers.*.mlp.up_proj": "colwise"})
    with pytest.raises(FcEvalError, match=r"no layer of LlamaForCausalLM matches .*there are none"):
        find_sites(model)


def test_an_encoder_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(num_layers=1, d_model=16, d_ff=16, num_heads=2, d_kv=8))
    with pytest.raises(FcEvalError, match="has an encoder"):
        find_sites(model)


def test_anything_else_is_refused():
    with pytest.raises(FcEvalError, match="Linear is not a transformers model"):
        find_sites(nn.Linear(4, 4))


class PackedLinear(nn.Linear):
    """Stands for the layers of GPTQ, AWQ or bitsandbytes."""


class PackedTensor(torch.Tensor):
    """Stands for the weights of torchao."""


def with_layer(model, layer: nn.Module):
    model.model.layers[1].mlp.down_proj = layer
    return model


def test_a_quantized_layer_is_refused_by_name():
    model = with_layer(tiny_model(Shape(2, 64, 64, 4, 2)), PackedLinear(64, 64, bias=False))
    with pytest.raises(FcEvalError, match=r"^model\.layers\.1\.mlp\.down_proj is a .*PackedLinear, not a plain"):
        find_sites(model)


def test_a_layer_that_is_no_linear_is_refused_by_name():
    model = with_layer(tiny_model(Shape(2, 64, 64, 4, 2)), nn.Identity())
    with pytest.raises(FcEvalError, match=r"^model\.layers\.1\.mlp\.down_proj is a .*Identity, not a plain"):
        find_sites(model)


def test_a_quantized_weight_is_refused_by_name():
    layer = nn.Linear(64, 64, bias=False)
    packed = torch.zeros(64, 64).as_subclass(PackedTensor)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    assert type(layer.weight) is PackedTensor
    with pytest.raises(FcEvalError, match=r"^model\.layers\.1\.mlp\.down_proj is a .*PackedTensor, not a plain"):
        find_sites(with_layer(tiny_model(Shape(2, 64, 64, 4, 2)), layer))


def test_a_parametrized_layer_is_refused_by_name():
    model = tiny_model(Shape(2, 64, 64, 4, 2))
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)
    with pytest.raises(FcEvalError, match=r"^model\.layers\.0\.self_attn\.o_proj is a .*not a plain"):
        find_sites(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_world_sizes_that_divide(family_model, world_size):
    check_world_size(find_sites(family_model()), world_size)


def test_a_world_size_that_does_not_divide_names_the_layer_and_what_would(family_model):
    with pytest.raises(FcEvalError) as caught:
        check_world_size(find_sites(family_model()), 5)
    assert str(caught.value) == (
        "tp=5 does not divide model.layers.0.self_attn.o_proj, which has 192 input features: "
        "choose tp=1, 2, 3, 4, 6, 8, 12, 16"
    )


@pytest.mark.parametrize("world_size", [0, -2])
def test_a_world_size_below_one(family_model, world_size):
    with pytest.raises(FcEvalError, match=f"tp={world_size} is not possible"):
        check_world_size(find_sites(family_model()), world_size)
