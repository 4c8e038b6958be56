"""The emulated split: the same bytes as an all-reduce over partial sums made by hand, and nothing left behind."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from fc_eval.codec.select import get_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.collective.traffic import traffic_of
from fc_eval.errors import FcEvalError
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.policy import Policy, Rule
from fc_eval.parallel.row_parallel import partial_sums
from fc_eval.parallel.sites import find_sites

COMMS = ["fp32_ordered", "plain", "int4", "int4_int8", "one_step:int6", "ring:int8", "hierarchical@2:int5-g32"]
DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"]


def attach(model, comm="int4", tp=2):
    return communicate(model, comm, tp, codec="reference")


def logits(model, ids) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def values(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
        model.get_submodule(site.name).bias.data = values(index, site.out_features, dtype=torch.bfloat16)
    return model


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("comm", COMMS)
def test_a_layer_is_the_all_reduce_of_its_partial_sums_bit_for_bit(biased, comm, tp):
    x = {"o_proj": values(7, 3, 5, 192, dtype=torch.bfloat16), "down_proj": values(8, 3, 5, 384, dtype=torch.bfloat16)}
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
    x = values(3, *shape)
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
        x = values(11, 32, site.in_features)
        unsplit = module(x)
        with attach(tiny, "fp32_ordered", tp):
            split = module(x)
        n, unit = site.in_features + tp, 2.0**-24
        bound = 2 * n * unit / (1 - n * unit) * (x.double().abs() @ module.weight.double().abs().t())
        assert ((split.double() - unsplit.double()).abs() <= bound).all()
        assert not torch.equal(split, unsplit)


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


def test_weights_are_never_written(tiny, token_ids):
    before = {name: (p.data_ptr(), p.clone()) for name, p in tiny.named_parameters()}
    with attach(tiny, "int2", 4):
        logits(tiny, token_ids)
    for name, parameter in tiny.named_parameters():
        pointer, value = before[name]
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, value)


def state_of(model) -> dict[str, dict[str, object]]:
    """Everything that stands on each module, hooks included."""
    return {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_is_left_behind(tiny, token_ids, tp):
    expected, before = logits(tiny, token_ids), state_of(tiny)
    with attach(tiny, "int4", tp):
        logits(tiny, token_ids)
        assert state_of(tiny) != before
    assert state_of(tiny) == before
    assert torch.equal(logits(tiny, token_ids), expected)


def test_nothing_is_left_behind_after_an_exception(tiny):
    before = state_of(tiny)
    with pytest.raises(KeyError, match="passes through"), attach(tiny):
        raise KeyError("passes through")
    assert state_of(tiny) == before


@pytest.mark.parametrize(
    ("comm", "tp", "message"),
    [
        ("int44", 2, "unknown comm"),
        ("int4", 5, "tp=5 does not divide"),
        (Policy(BASELINE, (Rule("*.nothing", BASELINE),)), 2, "matches no row-parallel layer"),
    ],
)
def test_nothing_is_left_behind_when_attaching_fails(tiny, comm, tp, message):
    before = state_of(tiny)
    with pytest.raises(FcEvalError, match=message), attach(tiny, comm, tp):
        pass
    assert state_of(tiny) == before


def test_a_forward_that_someone_else_has_put_there_comes_back(family_model):
    model = copy.deepcopy(family_model())
    module = model.model.layers[0].mlp.down_proj
    mine = module.forward
    module.forward = mine
    with attach(model):
        assert module.forward is not mine
    assert module.forward is mine


@pytest.mark.parametrize("tp", [1, 2])
def test_attaching_twice_is_an_error_and_keeps_the_first(tiny, token_ids, tp):
    with attach(tiny, "int4", tp) as attachment:
        expected = logits(tiny, token_ids)
        with pytest.raises(FcEvalError, match="communicates already"), attach(tiny, "int8", tp):
            pass
        assert torch.equal(logits(tiny, token_ids), expected)
        assert attachment.stats().forwards == 2


def test_the_same_model_can_be_attached_again(tiny, token_ids):
    results = []
    for _ in range(2):
        with attach(tiny):
            results.append(logits(tiny, token_ids))
    assert torch.equal(*results)


def test_gradients_are_refused(family_model, token_ids):
    model = copy.deepcopy(family_model()).requires_grad_(True)
    with attach(model):
        with pytest.raises(FcEvalError, match=r"o_proj was called with gradients enabled.*torch\.no_grad"):
            model(input_ids=token_ids)
        with torch.no_grad():
            assert not model(input_ids=token_ids).logits.requires_grad


def test_autocast_is_refused(tiny, token_ids):
    with (
        attach(tiny),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(FcEvalError, match="evaluate without autocast"),
    ):
        logits(tiny, token_ids)


def test_another_input_dtype_is_refused(tiny):
    with attach(tiny), pytest.raises(FcEvalError, match=r"got torch\.float64 for its torch\.float32 weight"):
        tiny.model.layers[0].self_attn.o_proj(torch.zeros(2, 192, dtype=torch.float64))


def test_a_dtype_that_cannot_be_communicated_is_refused(family_model):
    with pytest.raises(FcEvalError, match=r"o_proj is torch\.float64: expected bf16, fp16, fp32"):
        attach(copy.deepcopy(family_model()).double()).__enter__()


def test_meta_weights_are_refused(family_model):
    with pytest.raises(FcEvalError, match="o_proj is not in memory"):
        attach(copy.deepcopy(family_model()).to("meta")).__enter__()


@pytest.mark.parametrize("comm", ["int4", "fp32_ordered"])
def test_offloaded_layers_give_the_same_bits(family_model, token_ids, tmp_path, comm):
    from accelerate import cpu_offload, disk_offload

    with attach(family_model(), comm, 4):
        expected = logits(family_model(), token_ids)
    on_cpu = cpu_offload(copy.deepcopy(family_model()), torch.device("cpu"))
    on_disk = disk_offload(copy.deepcopy(family_model()), str(tmp_path), torch.device("cpu"))
    for model in (on_cpu, on_disk):
        assert model.model.layers[0].mlp.down_proj.weight.is_meta
        before = state_of(model)
        with attach(model, comm, 4) as attachment:
            assert torch.equal(logits(model, token_ids), expected)
            attachment.check_calls()
        assert (
            model.model.layers[0].mlp.down_proj._old_forward == before["model.layers.0.mlp.down_proj"]["_old_forward"]
        )
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
    x = values(8, 15, 384, dtype=torch.bfloat16).cuda()
    parsed = parse_comm(comm)
    codec, _ = get_codec("reference", parsed.formats, x.dtype, x.device)
    expected = all_reduce(partial_sums(x, module.weight, 4), parsed, codec).values + module.bias
    with attach(model, comm, 4):
        assert torch.equal(module(x), expected)


@pytest.mark.gpu
def test_a_model_on_several_devices(family_model, token_ids, checkpoint):
    from transformers import AutoModelForCausalLM

    other = 1 if torch.cuda.device_count() > 1 else "cpu"  # accelerate runs a layer offloaded to the CPU on GPU 0
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], 0)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, device_map=places | {"model.layers.1": other}, dtype=torch.bfloat16
    )
    on_one = copy.deepcopy(family_model(dtype="bfloat16")).cuda()
    with attach(on_one, "int4", 4):
        expected = logits(on_one, token_ids.cuda())
    with attach(model, "int4", 4) as attachment:
        assert torch.equal(logits(model, token_ids.cuda()), expected)
        attachment.check_calls()
        assert attachment.stats().nonfinite_groups == 0


def test_calls_and_bytes_are_counted_exactly(tiny_bf16, token_ids):
    with attach(tiny_bf16, "int4_int8", 3) as attachment:
        for ids in (token_ids, token_ids[:1], token_ids):
            logits(tiny_bf16, ids)
        attachment.check_calls()
        stats = attachment.stats()
    per_call = [traffic_of(parse_comm("int4_int8"), 3, tokens, 192, "bf16") for tokens in (48, 24, 48)]
    assert stats.forwards == 3
    assert stats.calls == {site.name: 3 for site in attachment.sites}
    assert (stats.tokens, stats.elements) == (120, 4 * 120 * 192)
    assert [stage.stage for stage in stats.stages] == ["reduce", "gather"]
    for index, stage in enumerate(stats.stages):
        assert stage.elements == stats.elements
        assert stage.encoded_bytes == 4 * sum(t.stages[index].encoded_bytes for t in per_call)
        sent = zip(*(t.stages[index].bytes_per_rank for t in per_call), strict=True)
        assert stage.bytes_per_rank == tuple(4 * sum(rank) for rank in sent)
        assert stage.nonfinite_groups == 0
    bits = [8 * stage.encoded_bytes / stats.elements for stage in stats.stages]
    assert stats.effective_bits == pytest.approx(sum(bits) / 2, rel=1e-12)  # the same mean, summed in another order
    busiest = max(map(sum, zip(*(stage.bytes_per_rank for stage in stats.stages), strict=True)))
    assert stats.wire_bytes_per_rank == busiest
    assert stats.wire_bytes_per_token == busiest / 120
    assert (stats.world_size, stats.qdq_rounds, stats.codec) == (3, 2, "reference")


def test_a_policy_mixes_stages_and_weighs_bits_by_elements(tiny_bf16, token_ids):
    policy = Policy(parse_comm("int4"), (Rule("*.down_proj", parse_comm("one_step:int8")),))
    with attach(tiny_bf16, policy, 2) as attachment:
        logits(tiny_bf16, token_ids)
        stats = attachment.stats()
    int4, int8 = (traffic_of(parse_comm(c), 2, 48, 192, "bf16") for c in ("int4", "one_step:int8"))
    assert {s.stage: s.elements for s in stats.stages} == {"reduce": 4 * 48 * 192, "gather": 2 * 48 * 192}
    mean = (int4.effective_bits + int8.effective_bits) / 2
    assert stats.effective_bits == pytest.approx(mean, rel=1e-12)  # the same mean, summed in another order
    assert stats.wire_bytes_per_rank == 2 * (int4.wire_bytes_per_rank + int8.wire_bytes_per_rank)
    assert attachment.comms["model.layers.0.mlp.down_proj"].algorithm == "one_step"


def test_non_finite_groups_are_counted_over_calls_in_both_modes(tiny):
    module = tiny.model.layers[0].mlp.down_proj
    x = values(5, 4, 384)
    x[1, 0] = float("inf")  # in the first rank's slice: its whole row of partial sums is not finite
    with attach(tiny, "int4", 2) as attachment:
        with torch.inference_mode():
            y = module(x)
        with torch.no_grad():
            module(x)
        stats = attachment.stats()
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()
    # A row has two groups (128 and 64 elements): one rank's in the reduce stage, their sum in the gather stage.
    assert [stage.nonfinite_groups for stage in stats.stages] == [4, 4]
    assert stats.nonfinite_groups == 8


def test_switching_starts_the_counts_anew_and_using_leaves_them_alone(tiny, token_ids):
    with attach(tiny, "int4", 2) as attachment:
        int4 = logits(tiny, token_ids)
        with attachment.using("int8"):
            int8 = logits(tiny, token_ids)
            assert attachment.stats().forwards == 1
        assert attachment.stats().forwards == 1
        assert attachment.stats().effective_bits == traffic_of(parse_comm("int4"), 2, 48, 192, "fp32").effective_bits
        attachment.set_comm("int8")
        assert attachment.stats().forwards == 0
        assert torch.equal(logits(tiny, token_ids), int8)
        attachment.check_calls()
        attachment.reset_stats()
        assert attachment.stats().elements == 0
        with pytest.raises(FcEvalError), attachment.using("int44"):
            pass
        attachment.set_comm("int4", codec="auto")
        assert torch.equal(logits(tiny, token_ids), int4)


def test_an_unknown_codec_is_an_error(tiny):
    with pytest.raises(FcEvalError, match="unknown codec 'fast'"), communicate(tiny, "int4", 2, codec="fast"):
        pass


def test_no_forward_pass_is_caught(tiny):
    with attach(tiny) as attachment, pytest.raises(FcEvalError, match="no forward pass of the model was seen"):
        attachment.check_calls()


def test_a_skipped_layer_is_caught(tiny, token_ids, monkeypatch):
    monkeypatch.setattr(tiny.model.layers[1].mlp, "forward", lambda x: x)
    with attach(tiny) as attachment:
        logits(tiny, token_ids)
        with pytest.raises(FcEvalError, match=r"1 of 4 .* \(model\.layers\.1\.mlp\.down_proj: 0 times in 1\)"):
            attachment.check_calls()


def test_a_layer_that_is_called_twice_is_caught(tiny, token_ids):
    with attach(tiny) as attachment:
        logits(tiny, token_ids)
        tiny.model.layers[0].self_attn.o_proj(values(0, 1, 192))
        with pytest.raises(FcEvalError, match=r"1 of 4 .* \(model\.layers\.0\.self_attn\.o_proj: 2 times in 1\)"):
            attachment.check_calls()


def test_a_replaced_forward_is_caught(tiny, token_ids):
    module = tiny.model.layers[0].mlp.down_proj
    with attach(tiny) as attachment:
        ours = module.forward
        module.forward = lambda x: linear(x, module.weight)
        logits(tiny, token_ids)
        with pytest.raises(FcEvalError, match="something has replaced their forward"):
            attachment.check_calls()
        module.forward = ours
