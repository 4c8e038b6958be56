"""Another system's all-reduce is a comm like any other: names, presets, rules, records; and where it cannot run."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import attach, logits
from test_cli import run_cli

import fc_eval
from fc_eval.codec.peers.table import PEERS
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.codec.select import get_codec
from fc_eval.collective import distributed
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.comm_config import CommConfig, named_comm
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.presets import options, preset
from fc_eval.sweep.foresight import check_ahead

TINY = ["model=tiny", "tp=2", "eval=text", "device=cpu", "threads=1"]


@pytest.mark.parametrize("name", PEERS)
def test_a_name_is_a_preset_and_reads_back(name):
    comm = parse_comm(name)
    assert name in options("comm")
    assert CommConfig(**preset("comm", name)).build() == comm
    assert comm == Comm("peer", peer=PEERS[name]) == parse_comm(comm.name) == parse_comm(f"peer_{name}")
    assert (comm.name, comm.short_name, comm.label) == (f"peer:{name}", name, PEERS[name].label)
    assert comm.is_quantized
    assert comm.formats == (PEERS[name],)
    late = parse_comm(f"{name}+min64")
    assert parse_comm(late.name) == late == named_comm(f"{name}+min64").build()
    assert late.at(64) == comm
    assert late.at(63) == fc_eval.parse_comm("fp32_ordered")
    assert late.label == f"{PEERS[name].label}, 64+ tokens"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_comm("quickreduce_q5"), "unknown comm 'quickreduce_q5': did you mean 'quickreduce_q"),
        (lambda: parse_comm("peer:int4"), "unknown format of another system 'int4'"),
        (lambda: parse_comm("peer"), "unknown format of another system ''"),
        (lambda: parse_comm("one_step:vllm_int8"), "vllm_int8 is the all-reduce of another system"),
        (lambda: parse_comm("int4/vllm_int8"), "vllm_int8 is the all-reduce of another system"),
        (lambda: Comm("two_step", peer=PEERS["vllm_int8"]), "two_step needs a reduce format"),
        (lambda: Comm("fp32_ordered", peer=PEERS["vllm_int8"]), "fp32_ordered cannot send the format of another"),
        (lambda: Comm("peer"), "peer needs the format of another system: quickreduce_q8"),
        (lambda: parse_comm("vllm_int8").with_group(32), "the groups of vllm_int8 are its system's own"),
        (lambda: compose_one([*TINY, "comm=vllm_int8", "comm.gather=int4"]), "leave out the gather format 'int4"),
        (lambda: compose_one([*TINY, "comm.reduce=vllm_int8"]), "use it as a comm, as in comm=vllm_int8"),
        (lambda: fc_eval.encode(torch.zeros(4), "vllm_int8"), "emulated by value, and no format of one stage"),
        (
            lambda: fc_eval.all_reduce(torch.zeros(2, 3, 8), "vllm_int8", codec="cpu"),
            "codec cpu: |codec 'cpu'|vllm_int8 is another system's format",
        ),
        (
            lambda: check_ahead(compose_one([*TINY, "comm=vllm_int8", "exec=tp"])),
            "vllm_int8 is the all-reduce of another system, which exists in emulation only: leave out exec=tp",
        ),
        (
            lambda: check_ahead(compose_one([*TINY, "policy.rules=[{match:'*.o_proj',comm:vllm_int8}]", "exec=tp"])),
            "vllm_int8 is the all-reduce of another system, which exists in emulation only",
        ),
        (
            lambda: check_ahead(compose_one([*TINY, "comm=vllm_int8", "codec=cpu"])),
            "codec=cpu does not cover vllm_int8, the all-reduce of another system: use codec=auto",
        ),
        (
            lambda: distributed.all_reduce(
                torch.zeros(4, 64), parse_comm("vllm_int8"), ReferenceCodec(), SimpleNamespace(world_size=2)
            ),
            "exists in emulation only",
        ),
    ],
)
def test_what_cannot_be_says_why(make, message):
    with pytest.raises(FcEvalError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_record_says_which_codec_took_it_and_why():
    codec, note = get_codec("auto", parse_comm("vllm_int8").formats, torch.bfloat16, "cpu")
    assert codec.name == "reference"
    assert re.search(r"cpu: (vllm_int8 is another system's format, which it does not cover|.*not)", note)


def test_a_model_communicates_as_other_systems_do(tiny_bf16, token_ids):
    """The counts start at nothing, are those of the reduced values, and of several processes add up."""
    with attach(tiny_bf16, "flashinfer_fp8", 2) as attachment:
        assert attachment.stats().differing_values == 0
        fp8 = logits(tiny_bf16, token_ids)
        stats, counts = attachment.stats(), attachment.counts()
        attachment.set_counts([counts, counts])
        assert attachment.stats().differing_values == 2 * stats.differing_values
        attachment.set_comm("quickreduce_q8")
        assert not torch.equal(logits(tiny_bf16, token_ids), fp8)
        assert attachment.stats().differing_values == 0
    assert stats.elements // 4 < stats.differing_values < stats.elements
    assert (stats.codec, stats.qdq_rounds) == ("reference", 2)
    assert [stage.stage for stage in stats.stages] == ["reduce", "gather"]


def test_one_rank_and_no_tokens():
    for name in PEERS:
        x = torch.randn(1, 3, 8)
        assert torch.equal(fc_eval.all_reduce(x, name), x[0])
        assert fc_eval.all_reduce(torch.zeros(8, 0, 5), name).shape == (0, 5)


def test_formats_lists_them(capsys):
    status, out, _ = run_cli(capsys, "formats", "quickreduce_q4", "tensorrt_llm_fp8", "int4", "--tokens", "4")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert status == 0
    assert rows[0] == ["quickreduce_q4", "4.5", "4.5000", "3.56x", "reference"]
    assert rows[1][:2] == ["tensorrt_llm_fp8", "8.258"]
    _, everything, _ = run_cli(capsys, "formats")
    assert all(f"\n{name} " in everything for name in PEERS)


def test_results_are_told_apart_by_fingerprint():
    names = {compose_one([*TINY, f"comm={name}"]).identity()["comm"] for name in PEERS}
    assert len(names) == len(PEERS)
