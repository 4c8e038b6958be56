"""Standing in for a layer's forward: what others do to the model meanwhile, and that nothing of it lasts."""

import copy
import io
import pickle
import types

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from conftest import attach, logits, random_values
from torch import nn

from fc_eval.errors import FcEvalError

NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def model(family_model):
    return copy.deepcopy(family_model())


@pytest.fixture
def layer(model):
    return model.get_submodule(NAME)


@pytest.fixture
def plain(tiny, token_ids):
    return logits(tiny, token_ids)


@pytest.fixture
def quantized(tiny, token_ids):
    with attach(tiny):
        return logits(tiny, token_ids)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_accelerate(model):
    """No pickle can hold accelerate's local functions, but a copy can."""
    assert vars(model.get_submodule(NAME))["_old_forward"].active
    return copy.deepcopy(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, with_accelerate, through_pickle, through_torch_save])
def test_a_copy_does_not_communicate(model, layer, token_ids, plain, quantized, duplicate):
    if duplicate is with_accelerate:
        add_hook_to_module(layer, AlignDevicesHook())
    with attach(model) as attachment:
        twin = duplicate(model)
        assert torch.equal(logits(twin, token_ids), plain)
        assert attachment.stats().forwards == 0
        assert torch.equal(logits(model, token_ids), quantized)
        attachment.check_calls()
        with attach(twin) as other:  # and can communicate on its own at the same time
            assert torch.equal(logits(twin, token_ids), quantized)
            other.check_calls()
        assert attachment.stats().forwards == 1
    assert torch.equal(logits(twin, token_ids), plain)
    assert torch.equal(logits(model, token_ids), plain)
    twin.get_submodule(NAME).weight.data.zero_()  # a copy has its own weights
    assert not torch.equal(logits(twin, token_ids), plain)
    assert torch.equal(logits(model, token_ids), plain)


def test_what_shares_a_layer_stops_to_communicate_with_it(model, layer):
    x = random_values(1, 3, 384)
    plain = layer(x)
    with attach(model):
        kept, shallow, alone = layer.forward, copy.copy(layer), copy.deepcopy(layer)
        quantized = layer(x)
        assert torch.equal(kept(x), quantized)
        assert torch.equal(alone(x), plain)
    assert not torch.equal(quantized, plain)
    for call in (layer, kept, shallow, alone):
        assert torch.equal(call(x), plain)


def test_a_state_dict_is_that_of_the_model(model, tmp_path, token_ids, plain):
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with attach(model):
        found = model.state_dict()
        model.save_pretrained(tmp_path)
        model.load_state_dict(found)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), token_ids), plain)


def doubled(module, x):
    return 2 * nn.functional.linear(x, module.weight)


class Doubling(ModelHook):
    def post_forward(self, module, output):
        return 2 * output


def replaced(layer):
    layer.forward = types.MethodType(doubled, layer)


def replaced_by_a_function(layer):
    layer.forward = lambda x: doubled(layer, x)


def replaced_by_another_layers(layer):
    layer.forward = nn.Linear(384, 192).forward


def replaced_below_accelerate(layer):
    replaced(layer)
    add_hook_to_module(layer, AlignDevicesHook())


@pytest.mark.parametrize(
    "replace", [replaced, replaced_by_a_function, replaced_by_another_layers, replaced_below_accelerate]
)
@pytest.mark.parametrize("comm", ["int4", "fp32_ordered"])
def test_a_forward_that_someone_has_replaced_is_not_passed_over(model, layer, token_ids, replace, comm):
    replace(layer)
    before, expected = dict(vars(layer)), logits(model, token_ids)
    with pytest.raises(FcEvalError, match=rf"the forward of {NAME} was replaced by '.*', which the emulated"):
        attach(model, comm).__enter__()
    assert vars(layer) == before
    assert torch.equal(logits(model, token_ids), expected)
    with attach(model, comm, tp=1):  # nothing is split
        assert torch.equal(logits(model, token_ids), expected)


def test_a_patched_class_is_not_passed_over(model, monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", doubled)
    with pytest.raises(FcEvalError, match="was replaced by 'doubled'"):
        attach(model).__enter__()


def test_the_layers_own_forward_may_stand_on_it(model, layer, token_ids, quantized):
    own = layer.forward
    layer.forward = own  # as accelerate leaves it when it lets go of a layer
    with attach(model):
        assert layer.forward is not own
        assert torch.equal(logits(model, token_ids), quantized)
    assert vars(layer)["forward"] is own


def test_hooks_of_torch_and_of_accelerate_take_part(model, layer):
    x = random_values(1, 3, 384)
    with attach(model):
        expected = 4 * layer(2 * x)
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    add_hook_to_module(layer, Doubling())
    with attach(model):
        assert torch.equal(layer(x), expected)


def test_a_deleted_forward_is_caught_and_the_others_come_back(model, layer, token_ids, plain):
    with attach(model) as attachment:
        del layer.forward
        logits(model, token_ids)
        with pytest.raises(FcEvalError, match=rf"1 of 4 .* \({NAME}: 0 times in 1\)"):
            attachment.check_calls()
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(logits(model, token_ids), plain)


def test_what_others_put_there_meanwhile_stays(model, layer, token_ids):
    with attach(model):
        replaced(layer)
        expected = logits(model, token_ids)
    assert layer.forward.__func__ is doubled
    assert not torch.equal(logits(model, token_ids), expected)  # the other layers do not communicate any more


def test_accelerate_may_hook_a_layer_meanwhile(model, layer, token_ids, plain, quantized):
    with attach(model) as attachment:
        add_hook_to_module(layer, AlignDevicesHook())
        assert torch.equal(logits(model, token_ids), quantized)
        attachment.check_calls()
    assert torch.equal(logits(model, token_ids), plain)
    with attach(model):
        assert torch.equal(logits(model, token_ids), quantized)
        remove_hook_from_module(layer)
        assert torch.equal(logits(model, token_ids), quantized)
    assert torch.equal(logits(model, token_ids), plain)
    remove_hook_from_module(layer)
    assert torch.equal(logits(model, token_ids), plain)


def test_a_dispatched_model_communicates(model, token_ids, quantized, plain):
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"], "cpu")
    dispatch_model(model, places | {"model.rotary_emb": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[0], "_hf_hook")
    with attach(model) as attachment:
        assert torch.equal(logits(model, token_ids), quantized)
        attachment.check_calls()
    remove_hook_from_submodules(model)
    assert torch.equal(logits(model, token_ids), plain)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_decoder_in_two_models_communicates_once(model, tp):
    other = type(model)(model.config)
    other.model = model.model
    with attach(model, tp=tp), pytest.raises(FcEvalError, match="communicates already"):
        attach(other, tp=tp).__enter__()
    with attach(other, tp=tp):
        pass


def test_a_layer_in_two_models_communicates_once(model, token_ids, quantized, plain):
    other = copy.deepcopy(model)
    other.model.layers[1] = model.model.layers[1]
    with attach(model):
        with pytest.raises(FcEvalError, match=r"layers\.1\.self_attn\.o_proj communicates already, in this model or"):
            attach(other).__enter__()
        assert torch.equal(logits(model, token_ids), quantized)
        assert all("forward" not in vars(module) for module in other.model.layers[0].modules())
        assert not other.model._forward_pre_hooks
    with attach(other):
        assert torch.equal(logits(other, token_ids), quantized)
    assert torch.equal(logits(other, token_ids), plain)


def test_an_exception_in_a_forward_pass_leaves_nothing_behind(model, layer, token_ids, plain, quantized):
    def fail(module, args):
        raise KeyError("passes through")

    with attach(model) as attachment:
        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="passes through"):
            logits(model, token_ids)
        hook.remove()
        with pytest.raises(FcEvalError, match="not reduced once per forward pass"):
            attachment.check_calls()
        attachment.reset_stats()
        assert torch.equal(logits(model, token_ids), quantized)
        attachment.check_calls()
    assert torch.equal(logits(model, token_ids), plain)
