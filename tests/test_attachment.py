"""Attaching to a model: nothing is left behind, counts are exact, and what would falsify a result is caught."""

import copy

import pytest
import torch
from conftest import attach, logits, random_values
from torch.nn.functional import linear

from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.collective.traffic import traffic_of
from fc_eval.errors import FcEvalError
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.policy import Policy, Rule


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
        ("int4", 0, "tp=0 is not possible: expected a whole number of ranks, at least 1"),
        ("int4", -2, "tp=-2 is not possible"),
        ("int4", None, "tp=None is not possible"),
        ("int4", 2.0, "tp=2.0 is not possible"),
        ("int4", "2", "tp='2' is not possible"),
        ("int4", True, "tp=True is not possible"),
        (None, 2, "unknown comm 'None'"),
        ("hierarchical@2:int4", 3, "node_size=2 does not divide the world size 3"),
        (Policy(BASELINE, (Rule("*.nothing", BASELINE),)), 2, "matches no row-parallel layer"),
    ],
)
def test_nothing_is_left_behind_when_attaching_fails(tiny, comm, tp, message):
    before = state_of(tiny)
    with pytest.raises(FcEvalError, match=message), attach(tiny, comm, tp):
        pass
    assert state_of(tiny) == before


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
    x = random_values(5, 4, 384)
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
        tiny.model.layers[0].self_attn.o_proj(random_values(0, 1, 192))
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
