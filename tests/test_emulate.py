"""The emulated split: the same bytes as an all-reduce over partial sums made by hand, wherever the layers lie."""

import contextlib
import copy

import pytest
import torch
from conftest import attach, logits, random_values
from torch import nn
from torch.nn.functional import linear

from fc_eval.codec.select import get_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.parallel.row_parallel import partial_sums
from fc_eval.parallel.sites import find_sites

COMMS = ["fp32_ordered", "plain", "int4", "int4_int8", "one_step:int6", "ring:int8", "hierarchical@2:int5-g32"]
DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"]


def by_hand(module: nn.Linear, x: torch.Tensor, comm: str, tp: int) -> torch.Tensor:
    """What tensor parallelism computes, written out: slices, partial sums in the dtype, all-reduce, bias."""
    weights = module.weight.chunk(tp, dim=1)
    partials = torch.stack([linear(part, w) for part, w in zip(x.chunk(tp, dim=-1), weights, strict=True)])
    parsed = parse_comm(comm)
    codec, _ = get_codec("reference", parsed.formats, x.dtype, x.device)
    y = all_reduce(partials.flatten(1, -2), parsed, codec).values.reshape(*x.shape[:-1], -1)
    return y if module.bias is None else y + module.bias


@pytest.fixture(scope="module")
def biased(family_model):
    """A LLaMA with a bias in each row-parallel layer; random biases, because fresh ones are zero."""
    model = copy.deepcopy(family_model(dtype="bfloat16", attention_bias=True, mlp_bias=True))
    for index, site in enumerate(find_sites(model)):
        model.get_submodule(site.name).bias.data = random_values(index, site.out_features, dtype="bfloat16")
    return model


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("comm", COMMS)
def test_a_layer_is_the_all_reduce_of_its_partial_sums_bit_for_bit(biased, comm, tp):
    x = {
        "o_proj": random_values(7, 3, 5, 192, dtype="bfloat16"),
        "down_proj": random_values(8, 3, 5, 384, dtype="bfloat16"),
    }
    with attach(biased, comm, tp) as attachment:
        for site in attachment.sites:
            module = biased.get_submodule(site.name)
            assert torch.equal(module(x[site.kind]), by_hand(module, x[site.kind], comm, tp))


def test_inputs_of_a_real_forward_pass_reach_the_all_reduce(tiny_bf16, token_ids):
    seen = []

    def keep(module, args, output):
        seen.append((module, args[0], output))

    with attach(tiny_bf16, "int4", 3) as attachment, contextlib.ExitStack() as stack:
        modules = [tiny_bf16.get_submodule(site.name) for site in attachment.sites]
        for module in modules:
            stack.callback(module.register_forward_hook(keep).remove)
        logits(tiny_bf16, token_ids)
    assert [module for module, _, _ in seen] == modules
    for module, x, y in seen:
        assert torch.equal(y, by_hand(module, x, "int4", 3))


@pytest.mark.parametrize("shape", [(192,), (1, 192), (7, 192), (2, 3, 4, 192)])
def test_leading_dimensions_are_tokens(tiny, shape):
    module = tiny.model.layers[0].self_attn.o_proj
    x = random_values(3, *shape)
    with attach(tiny, "int4", 2) as attachment:
        y = module(x)
        stats = attachment.stats()
    assert y.shape == (*shape[:-1], 192)
    assert stats.tokens == x.numel() // 192
    assert torch.equal(y.reshape(-1, 192), by_hand(module, x.reshape(-1, 192), "int4", 2))


@pytest.mark.parametrize("comm", COMMS)
def test_no_tokens(tiny, comm):
    with attach(tiny, comm, 2) as attachment:
        y = tiny.model.layers[0].mlp.down_proj(torch.zeros(2, 0, 384))
        stats = attachment.stats()
    assert y.shape == (2, 0, 192)
    assert (stats.calls["model.layers.0.mlp.down_proj"], stats.elements, stats.wire_bytes_per_rank) == (1, 0, 0)
    assert (stats.effective_bits, stats.wire_bytes_per_token) == (0.0, 0.0)


def test_the_bias_is_added_once(biased):
    module = biased.model.layers[1].mlp.down_proj
    with attach(biased, "fp32_ordered", 8):
        assert torch.equal(module(torch.zeros(2, 384, dtype=torch.bfloat16)), module.bias.expand(2, -1))


@pytest.mark.parametrize("tp", [2, 4])
def test_baseline_of_a_layer_is_within_the_error_bound_of_a_sum(tiny, tp):
    # Any order of summing K products is within gamma_n * sum |x w| of the exact sum (Higham, Accuracy and Stability,
    # section 3.1, n = K roundings here plus W of the ordered sum); two orders differ by at most twice that.
    for site in find_sites(tiny):
        module = tiny.get_submodule(site.name)
        x = random_values(11, 32, site.in_features)
        unsplit = module(x)
        with attach(tiny, "fp32_ordered", tp) as attachment:
            split = module(x)
        assert attachment.stats().wire_bytes_per_rank > 0  # the sum was split; its bits need not show it
        n, unit = site.in_features + tp, 2.0**-24
        bound = 2 * n * unit / (1 - n * unit) * (x.double().abs() @ module.weight.double().abs().t())
        assert ((split.double() - unsplit.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", DENSE)
def test_baseline_of_a_model_is_as_exact_as_the_unsplit_model(family_model, token_ids, family, dtype):
    model = family_model(family, dtype)
    exact = logits(copy.deepcopy(model).double(), token_ids)
    unsplit = (logits(model, token_ids).double() - exact).norm()
    for tp in (2, 4):
        with attach(model, "fp32_ordered", tp) as attachment:
            split = (logits(model, token_ids).double() - exact).norm()
            attachment.check_calls()
        # Splitting adds to the one rounding of a site W of partial sums, each about sqrt(W) times smaller: sqrt(2)
        # times the error of the unsplit model where sites dominate it, and little more than one time where they do not.
        assert 0 < split <= 1.5 * unsplit


def test_one_rank_leaves_everything_untouched(tiny_bf16, token_ids):
    expected = logits(tiny_bf16, token_ids)
    with attach(tiny_bf16, "int2", 1) as attachment:
        assert all("forward" not in tiny_bf16.get_submodule(site.name).__dict__ for site in attachment.sites)
        assert torch.equal(logits(tiny_bf16, token_ids), expected)
        attachment.check_calls()
        stats = attachment.stats()
    assert (stats.forwards, stats.elements, stats.stages, stats.codec) == (1, 0, (), "")
    assert set(stats.calls.values()) == {0}


def test_fewer_bits_move_the_logits_more(tiny, token_ids):
    errors = []
    with attach(tiny, BASELINE, 4) as attachment:
        baseline = logits(tiny, token_ids)
        for comm in ("int8", "int6", "int4", "int2"):
            attachment.set_comm(comm)
            errors.append((logits(tiny, token_ids) - baseline).norm())
    assert errors == sorted(errors)
    assert errors[0] > 0


@pytest.mark.parametrize("comm", ["int4", "fp32_ordered"])
def test_offloaded_layers_give_the_same_bits(family_model, token_ids, tmp_path, comm):
    from accelerate import cpu_offload, disk_offload

    with attach(family_model(), comm, 4):
        expected = logits(family_model(), token_ids)
    on_cpu = cpu_offload(copy.deepcopy(family_model()), torch.device("cpu"))
    on_disk = disk_offload(copy.deepcopy(family_model()), str(tmp_path), torch.device("cpu"))
    for model in (on_cpu, on_disk):
        assert model.model.layers[0].mlp.down_proj.weight.is_meta
        before = model.model.layers[0].mlp.down_proj._old_forward
        with attach(model, comm, 4) as attachment:
            assert torch.equal(logits(model, token_ids), expected)
            attachment.check_calls()
        assert model.model.layers[0].mlp.down_proj._old_forward is before
        assert not torch.equal(logits(model, token_ids), expected)


def test_a_device_map_is_emulated_where_each_layer_lies(family_model, token_ids, checkpoint):
    from transformers import AutoModelForCausalLM

    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, device_map=places, offload_folder=checkpoint.parent / "offload", dtype=torch.float32
    )
    assert model.model.layers[1].mlp.down_proj.weight.is_meta
    assert not model.model.layers[0].mlp.down_proj.weight.is_meta
    with attach(family_model(), "int4", 3):
        expected = logits(family_model(), token_ids)
    with attach(model, "int4", 3) as attachment:
        assert torch.equal(logits(model, token_ids), expected)
        attachment.check_calls()


@pytest.mark.gpu
@pytest.mark.parametrize("comm", COMMS)
def test_on_a_gpu_a_layer_is_the_all_reduce_of_its_partial_sums(biased, comm):
    model = copy.deepcopy(biased).cuda()
    module = model.model.layers[1].mlp.down_proj
    x = random_values(8, 15, 384, dtype="bfloat16").cuda()
    parsed = parse_comm(comm)
    codec, _ = get_codec("reference", parsed.formats, x.dtype, x.device)
    expected = all_reduce(partial_sums(x, module.weight, 4), parsed, codec).values + module.bias
    with attach(model, comm, 4):
        assert torch.equal(module(x), expected)


@pytest.mark.gpu
def test_a_model_on_several_devices(token_ids, checkpoint):
    from transformers import AutoModelForCausalLM

    other = 1 if torch.cuda.device_count() > 1 else "cpu"  # accelerate runs a layer offloaded to the CPU on GPU 0
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], 0)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, device_map=places | {"model.layers.1": other}, dtype=torch.bfloat16
    )
    # Loaded the same way: rotary frequencies computed on the GPU differ in the last bit from those made on the CPU.
    on_one = AutoModelForCausalLM.from_pretrained(checkpoint, device_map={"": 0}, dtype=torch.bfloat16)
    with attach(on_one, "int4", 4):
        expected = logits(on_one, token_ids.cuda())
    with attach(model, "int4", 4) as attachment:
        assert torch.equal(logits(model, token_ids.cuda()), expected)
        attachment.check_calls()
        assert attachment.stats().nonfinite_groups == 0
