"""One rank's part of a model never gives numbers alone, and ranks with different models are told so."""

import re

import pytest
import rank_parts
import torch
from conftest import TINY_SHAPE
from rank_group import shared_group

from fc_eval.errors import FcEvalError, LostProcessError
from fc_eval.models.config import ModelConfig, TinySpec
from fc_eval.parallel.emulate import communicate
from fc_eval.quantized import load
from fc_eval.tensor_parallel import load_tensor_parallel

CONFIG = ModelConfig("parts", tiny=TinySpec(), shape=TINY_SHAPE)
NOT_TOGETHER = "FcEvalError: this model is one rank's part of a model, and it does not communicate"


def test_a_part_that_is_closed_or_copied_does_not_run_and_is_not_saved(token_ids, tmp_path):
    for found in shared_group().run(2, rank_parts.alone, CONFIG, token_ids, str(tmp_path)):
        assert found.pop("open") == "nothing"
        for saving in ("save", "save the decoder", "save a copy"):
            assert found.pop(saving).startswith(
                "FcEvalError: this model is one rank's part of a model, and its weights are slices"
            )
        assert set(found) == {"deepcopy", "pickle", "closed"}
        for text in found.values():
            assert text.startswith(NOT_TOGETHER)
    assert not list(tmp_path.iterdir())


def test_one_rank_alone_is_a_whole_model_that_stays_one(token_ids, tmp_path):
    (found,) = shared_group().run(1, rank_parts.alone, CONFIG, token_ids, str(tmp_path))
    assert set(found.values()) == {"nothing"}
    assert (tmp_path / "model.safetensors").exists()


def test_a_comm_that_ranks_cannot_send_is_refused_where_it_is_named(token_ids):
    comms = ["int4-had", "quickreduce_q4", "int5-g32-hat"]
    words = ["rotation exists in emulation only", "quickreduce_q4 is the all-reduce of another system", "int5-g32-hat"]
    for found in shared_group().run(2, rank_parts.other_comms, CONFIG, token_ids, comms):
        for (loading, switching, goes_on), expected in zip(found, words, strict=True):
            assert loading == switching
            assert re.search(f"FcEvalError: .*{expected}", loading)
            assert goes_on


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("weights", "the hash of sampled weights is [0-9a-f]{16} on rank 1"),
        ("attention", "model.attn_implementation is eager on rank 1 and sdpa on rank 0"),
    ],
)
def test_ranks_with_different_models_are_told_when_they_load(difference, words):
    for text in shared_group().run(2, rank_parts.other_models, CONFIG, difference):
        assert re.match(f"FcEvalError: the ranks do not do the same: {words}", text), text


def test_a_rank_that_has_converted_its_part_is_told_before_anything_travels(token_ids):
    for text in shared_group().run(2, rank_parts.other_dtype, CONFIG, token_ids):
        assert "the dtype of the row-parallel layers is torch.float32 on rank 1 and torch.bfloat16 on rank 0" in text


def test_calls_that_one_rank_finds_wrong_end_all_of_them(token_ids):
    for first, second in shared_group().run(2, rank_parts.miscounted, CONFIG, token_ids):
        assert re.match("FcEvalError: rank 1: 4 of 4 row-parallel layers were not reduced once per forward", first)
        assert second == "nothing"


def test_a_layer_called_by_itself_is_told_before_anything_travels(token_ids):
    for before, between, after in shared_group().run(2, rank_parts.one_layer, CONFIG, token_ids):
        assert between == "nothing"
        for text in (before, after):
            assert text.startswith("FcEvalError: model.layers.0.mlp.down_proj was called outside of a forward pass")


EDITS = [
    "another",
    "deepcopy",
    "pickle",
    "copy of an edited one",
    "reorder_cache",
    "batch_select_indices",
    "batch_repeat_interleave",
    "crop",
    "one layer",
]


@pytest.mark.parametrize("edit", EDITS)
def test_caches_that_differ_are_told_however_they_came_to_and_equal_ones_give_the_emulators_logits(edit, token_ids):
    model = load(CONFIG, "cpu").model
    with communicate(model, "int4", 2, "reference", "full"):
        expected = [rank_parts.continued(model, token_ids, edit, mine) for mine in (False, True)]
    for text, (one, other) in shared_group().run(2, rank_parts.edited, CONFIG, token_ids, edit):
        assert re.match(
            "FcEvalError: the ranks do not do the same: the hash of the cache's history is [0-9a-f]{16} on", text
        )
        assert torch.equal(one, expected[0])
        assert torch.equal(other, expected[1])


def test_beam_search_gives_the_emulators_tokens(token_ids):
    model = load(CONFIG, "cpu").model
    with communicate(model, "int4", 2, "reference", "full"):
        expected = rank_parts.searched(model, token_ids)
    for tokens in shared_group().run(2, rank_parts.beams, CONFIG, token_ids):
        assert torch.equal(tokens, expected)


def test_a_cache_of_unknown_keys_is_refused(token_ids):
    for found in shared_group().run(2, rank_parts.unknown_caches, CONFIG, token_ids):
        for name in ("without use_cache", "emptied", "empty"):
            assert found.pop(name) == "nothing"
        assert "the cache's history is unknown on rank 1 and" in found.pop("made by hand on rank 1")
        assert found.pop("given up") == "ZeroDivisionError: division by zero"
        assert set(found) == {"made by hand", "written to by hand", "of a pass that was given up"}
        for text in found.values():
            assert text.startswith("FcEvalError: the cache holds keys of which the ranks cannot tell")


def test_ranks_with_other_arguments_beside_tensors_are_told(token_ids):
    cases = [{"use_cache": False}, {"is_causal": False}, {"logits_to_keep": 2}, {"window": (4, 1.5)}]
    for found in shared_group().run(2, rank_parts.other_arguments, CONFIG, token_ids, cases):
        for (name, value), text in zip((pair for case in cases for pair in case.items()), found, strict=False):
            shown = "window.0=4, " if name == "window" else f"{name}={value}"
            assert re.match(
                f"FcEvalError: the ranks do not do the same: what was given beside tensors is .*{shown}.* on rank 1",
                text,
            )
        assert found[len(cases) :] == ["nothing"] * len(cases)


def test_what_is_called_within_a_pass_is_refused_and_the_pass_goes_on(token_ids):
    first, second = shared_group().run(2, rank_parts.within_a_pass, CONFIG, token_ids)
    assert first.pop("after") == second.pop("after") == "nothing"
    assert set(first.values()) == {"True "}
    for name, text in second.items():
        named = {"using": "set_comm or using", "set_comm": "set_comm or using", "stats": "counts"}.get(name, name)
        named = "the model" if name == "its decoder" else named
        assert text.startswith(f"True FcEvalError: {named} was called while a forward pass is under way on this rank")


def test_a_pass_in_which_the_communication_is_closed_gives_no_logits(token_ids):
    for texts in shared_group().run(2, rank_parts.closed_within, CONFIG, token_ids):
        assert all(text.startswith(NOT_TOGETHER) for text in texts)


def test_a_refused_pass_does_not_count(token_ids):
    for refused, checked, forwards in shared_group().run(2, rank_parts.refused_once, CONFIG, token_ids):
        assert refused.startswith("FcEvalError: the ranks do not do the same: the hash of all inputs")
        assert (checked, forwards) == ("nothing", "2")


@pytest.mark.parametrize(
    ("environment", "error", "words"),
    [
        ({"RANK": "0"}, LostProcessError, "waited for the others of its world to make a group, and one of them has"),
        ({}, FcEvalError, r"cannot join the others \(.*RANK.*\): start the script with torchrun"),
    ],
)
def test_a_process_whose_others_never_come_is_told(environment, error, words, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=words):
        load_tensor_parallel("nowhere", 2, device="cpu", timeout_s=1)
    assert not torch.distributed.is_initialized()
