"""plan=full computes what real ranks compute, bit for bit, whatever the sizes."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from conftest import logits, random_values
from rank_group import shared_group
from rank_models import emulated, real
from torch import nn
from transformers.models.llama.modeling_llama import eager_attention_forward

from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig, Shape
from fc_eval.models.tiny import tiny_model
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.row_parallel import RowParallelForward
from fc_eval.parallel.shard import shard_
from fc_eval.parallel.split import find_split

# Widths that are no multiple of a vector, one head per rank, and key/value heads that three query heads share.
SHAPES = {
    3: Shape(layers=1, hidden=33, intermediate=51, heads=3, kv_heads=3, head_dim=10),
    5: Shape(layers=1, hidden=35, intermediate=55, heads=5, kv_heads=5, head_dim=6),
    7: Shape(layers=1, hidden=63, intermediate=210, heads=21, kv_heads=7, head_dim=24),
    8: Shape(layers=1, hidden=56, intermediate=88, heads=8, kv_heads=8, head_dim=6),
}
# (W, family, dtype, attention): those in fp32 differ as soon as one tensor holds all ranks' heads or features.
CASES = [
    *itertools.product(SHAPES, ["llama"], ["float32"], ["sdpa", "eager"]),
    (7, "gemma3_text", "float32", "eager"),
    (5, "gemma2", "float32", "eager"),  # a tanh caps its scores
    (7, "hrm_text", "float32", "sdpa"),  # a sigmoid of its own code between two layers
    (7, "qwen2", "float16", "eager"),
    (3, "qwen3", "bfloat16", "sdpa"),
]


def model_of(world_size, family, dtype, attention):
    """The same each time, with biases that are not zero."""
    model = tiny_model(SHAPES[world_size], family, 0, getattr(torch, dtype), attention)
    for index, (name, value) in enumerate(model.named_parameters()):
        if name.endswith("bias"):
            value.data.copy_(random_values(index, *value.shape))
    return model


@torch.inference_mode()
def generated(model, ids):
    """Logits of a padded batch, and of two more tokens from the cache."""
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    out = model(input_ids=ids, attention_mask=mask, use_cache=True)
    found = [out.logits]
    for _ in range(2):
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
        out = model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return found


@pytest.mark.parametrize(("world_size", "family", "dtype", "attention"), CASES)
def test_each_partial_sum_is_the_one_of_a_rank_alone(world_size, family, dtype, attention, token_ids, one_thread):
    """One rank after the other: each is handed the emulator's sums, so that its next partial sum can be compared."""
    ids, calls = token_ids[:, :11], []
    whole = model_of(world_size, family, dtype, attention)
    with communicate(whole, "fp32_ordered", world_size, "reference", "full") as attachment:

        def between(site, partials_WTH, own):
            calls.append((partials_WTH, own(site, partials_WTH)))
            return calls[-1][1]

        with attachment.reducing(between):
            expected = generated(whole, ids)
    split = find_split(whole, world_size, "full")
    for rank in range(world_size):
        part, sums = model_of(world_size, family, dtype, attention), iter(calls)
        shard_(part, split, rank)

        def reduce(site, partial_1TH, rank=rank, sums=sums):
            partials_WTH, sum_TH = next(sums)
            assert torch.equal(partial_1TH[0], partials_WTH[rank]), (rank, site.name)
            return sum_TH

        for site in split.sites:
            own = replace(site, in_features=site.in_features // world_size)
            RowParallelForward(part.get_submodule(site.name), own, 1, reduce).install()
        for one, other in zip(generated(part, ids), expected, strict=True):
            assert torch.equal(one, other), rank


@pytest.mark.parametrize("world_size", [3, 8])
def test_real_ranks_of_odd_sizes_give_the_emulators_logits(world_size, token_ids, one_thread):
    tiny = {"family": "llama", "seed": 0}
    shape = SHAPES[world_size]
    config = ModelConfig.from_mapping({"name": "odd", "tiny": tiny, "shape": vars(shape), "dtype": "fp32"})
    comms = ["fp32_ordered", "int4-g32"]
    expected = emulated(config, world_size, "full", comms, token_ids)
    for found in shared_group().run(world_size, real, config, "full", comms, token_ids):
        for comm in comms:
            assert torch.equal(found[comm]["logits"], expected[comm]["logits"])


def test_nothing_of_it_is_left_behind(token_ids):
    model = model_of(3, "llama", "float32", "eager")
    before, forwards = logits(model, token_ids), [vars(module).get("forward") for module in model.modules()]
    attention = model.model.layers[0].self_attn
    config = attention.config
    with communicate(model, "fp32_ordered", 3, "reference", "full"):
        logits(model, token_ids)
        assert attention.config is config
        kept = attention.forward, model.model.layers[0].mlp.act_fn.forward
        assert all(stand_in.active for stand_in in kept)
        stop = attention.q_proj.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, token_ids)
        stop.remove()
        assert attention.config is config
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert torch.equal(logits(model, token_ids), before)
    assert torch.equal(kept[1](before), nn.functional.silu(before))


def test_a_module_that_attends_twice_does_both_by_rank(token_ids):
    model, heads = model_of(3, "llama", "float32", "eager"), []
    attention = model.model.layers[0].self_attn
    once, kind = type(attention).forward, type(attention)

    def attend(module, query, *args, **kwargs):
        heads.append(query.shape[1])
        return eager_attention_forward(module, query, *args, **kwargs)

    @functools.wraps(once)
    def twice(self, *args, **kwargs):
        once(self, *args, **kwargs)
        return once(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", twice)
        patch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", attend)
        with communicate(model, "fp32_ordered", 3, "reference", "full"):
            logits(model, token_ids)
    assert heads == [1] * 6  # three ranks, each with one head, twice


def test_an_attention_with_a_way_of_its_own_is_refused_by_name(token_ids):
    model = model_of(3, "llama", "float32", "sdpa")

    class OwnAttention(type(model.model.layers[0].self_attn)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.model.layers[0].self_attn.__class__ = OwnAttention
    with (
        pytest.raises(FcEvalError, match=r"self_attn \(OwnAttention\) does not use transformers' attention interface"),
        communicate(model, "int4", 3, "reference", "full"),
    ):
        pass
    with communicate(model, "int4", 3, "reference", "row_only"):
        logits(model, token_ids)
