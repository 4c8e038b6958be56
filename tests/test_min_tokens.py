"""Calls of few tokens are left unquantized where a comm says so: the same in the emulator, between ranks, in counts."""

import pytest
import rank_models
import torch
from cases import Case
from conftest import attach, logits
from rank_group import shared_group
from shared_evaluations import write_tasks

from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.collective.traffic import traffic_of
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.spec import TaskSpec
from fc_eval.models.config import ModelConfig
from fc_eval.models.load import load_model
from fc_eval.parallel.emulate import communicate


def test_a_threshold_is_part_of_the_name():
    for text in ("int4+min64", "one_step:int6-g32+min2", "hierarchical@2:int4/int8+min7", "ring_int4+min1"):
        comm = parse_comm(text)
        assert parse_comm(comm.name) == comm
        assert comm.min_tokens == int(text.partition("+min")[2])
        assert comm.short_name.endswith(text[text.index("+") :])
        assert comm.label.endswith(f", {comm.min_tokens}+ tokens")
        assert comm.with_group(64).min_tokens == comm.min_tokens
    assert compose_one(["model=tiny", "comm=int4", "comm.min_tokens=64"]).comm.build() == parse_comm("int4+min64")
    assert compose_one(["model=tiny", "comm=int4", "comm.min_tokens=64"]).baseline().comm.build() == BASELINE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int4+64", r"'\+64' of comm 'int4\+64' is not possible: a threshold is written as in int4\+min64"),
        ("int4+min", r"'\+min' of comm"),
        ("fp32_ordered+min3", "fp32_ordered does not quantize: leave out min_tokens=3"),
    ],
)
def test_thresholds_that_are_not_possible(text, words):
    with pytest.raises(FcEvalError, match=words):
        parse_comm(text)
    with pytest.raises(FcEvalError, match="min_tokens=-1 is not possible"):
        compose_one(["model=tiny", "comm=int4", "comm.min_tokens=-1"])


@pytest.mark.parametrize("name", ["int4-g32", "one_step:int6-g32", "ring:int4-g32", "hierarchical@2:int4"])
def test_below_the_threshold_a_call_is_the_baseline_and_from_there_the_comm(name):
    comm, plain = parse_comm(f"{name}+min5"), parse_comm(name)
    for tokens in (1, 4, 5, 9):
        partials = Case("int4", "bf16", tokens, 70, "normal").partials(4)
        found = all_reduce(partials, comm, ReferenceCodec())
        expected = all_reduce(partials, plain if tokens >= 5 else BASELINE, ReferenceCodec())
        assert torch.equal(found.values, expected.values)
        assert found.traffic == expected.traffic == traffic_of(comm, 4, tokens, 70, "bf16")
        assert found.nonfinite_groups.shape == expected.nonfinite_groups.shape


def test_both_kinds_of_calls_are_counted_apart(tiny_bf16, token_ids):
    """One-step has one stage, the baseline two: bytes and elements of each stage are those of its own calls."""
    short, long = token_ids[:1, :3], token_ids
    counted = {}
    for comm, batches in {
        "one_step:int6-g32+min10": [long, short, long],
        "one_step:int6-g32": [long, long],
        "fp32_ordered": [short],
    }.items():
        with attach(tiny_bf16, comm) as attachment:
            for ids in batches:
                logits(tiny_bf16, ids)
            attachment.check_calls()
            counted[comm] = attachment.stats()
    both, quantized, plain = counted.values()
    assert (both.unquantized_calls, quantized.unquantized_calls, plain.unquantized_calls) == (4, 0, 4)
    assert both.elements == quantized.elements + plain.elements
    sums = {stage.stage: stage for stage in both.stages}
    for key in ("elements", "encoded_bytes"):
        parts = [getattr(stats.stages[0], key) for stats in (quantized, plain)]
        assert getattr(sums["reduce"], key) == sum(parts)
        assert getattr(sums["gather"], key) == getattr(plain.stages[1], key)
    assert both.wire_bytes_per_rank == quantized.wire_bytes_per_rank + plain.wire_bytes_per_rank
    weighted = quantized.effective_bits * quantized.elements + plain.effective_bits * plain.elements
    assert both.effective_bits == pytest.approx(weighted / both.elements, rel=1e-12)  # float sums in another order


def test_prefill_alone_is_quantized_in_generation_between_real_ranks(checkpoint, tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path)
    spec = TaskSpec("sampled", str(tmp_path / "sampled.yaml"))
    config = ModelConfig("mine", path=str(checkpoint))
    model = load_model(config).model
    for comm in ("int4+min4", "one_step:int6-g32+min4"):
        with communicate(model, comm, 2, "reference", "full") as attachment:
            expected = rank_models.evaluated(model, attachment, spec, 3)
        # Two batches of three and two prompts: a prefill and three steps each, of as many tokens as prompts.
        assert expected["stats"].unquantized_calls == 4 * 6
        assert expected["stats"].forwards == 8
        found = shared_group().run(2, rank_models.evaluated_by_ranks, config, "full", comm, spec)
        assert found == [expected, expected]
