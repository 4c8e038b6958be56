"""What ranks do in tests of one rank's part of a model: parts that are copied, closed, saved, or that differ."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from conftest import logits
from transformers import DynamicCache

from fc_eval import tensor_parallel
from fc_eval.collective.ranks import Ranks
from fc_eval.models.config import ModelConfig, TinySpec
from fc_eval.parallel.emulate import Attachment
from fc_eval.parallel.self_check import SelfCheck
from fc_eval.tensor_parallel import TensorParallel, part_of


def said(call: Callable[[], Any]) -> str:
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fresh(ranks: Ranks, config: ModelConfig, comm: str = "int4") -> TensorParallel:
    """A part that no other test sees."""
    return part_of(config, ranks, comm, device="cpu", plan="full", codec="reference")


def alone(ranks: Ranks, config: ModelConfig, ids: torch.Tensor, folder: str) -> dict[str, str]:
    """What copies of a part say, the part itself before and after it is closed, and saving it."""
    part = fresh(ranks, config)
    found = {
        "deepcopy": said(lambda: logits(copy.deepcopy(part.model), ids)),
        "pickle": said(lambda: logits(pickle.loads(pickle.dumps(part.model)), ids)),
        "save": said(lambda: part.model.save_pretrained(folder)),
        "save the decoder": said(lambda: part.model.model.save_pretrained(folder)),
        "save a copy": said(lambda: copy.deepcopy(part.model).model.save_pretrained(folder)),
        "open": said(lambda: logits(part.model, ids)),
    }
    part.communication.close()
    return found | {"closed": said(lambda: logits(part.model, ids))}


def other_comms(ranks: Ranks, config: ModelConfig, ids: torch.Tensor, comms: list[str]) -> list[tuple[str, str, bool]]:
    """What loading with each comm and switching to it say, and whether the comm before goes on."""
    part = fresh(ranks, config)
    before, found = logits(part.model, ids), []
    for comm in comms:
        switching = said(lambda comm=comm: part.communication.set_comm(comm))
        loading = said(lambda comm=comm: fresh(ranks, config, comm))
        found.append((loading, switching, torch.equal(logits(part.model, ids), before)))
    return found


def other_models(ranks: Ranks, config: ModelConfig, difference: str) -> str:
    """What loading says when rank 1 has another model of the same sizes."""
    if ranks.rank == 1:
        changes: dict[str, Any] = {
            "weights": {"tiny": TinySpec(seed=7)},
            "attention": {"attn_implementation": "eager"},
        }
        config = replace(config, **changes[difference])
    return said(lambda: fresh(ranks, config))


def other_dtype(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> str:
    """What a forward pass says when rank 1 has converted its part."""
    part = fresh(ranks, config)
    if ranks.rank == 1:
        part.model.float()
    return said(lambda: logits(part.model, ids))


def miscounted(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> list[str]:
    """What the check of the calls says on all ranks when rank 1 has counted one too many, and the next one."""
    part, found = fresh(ranks, config), []
    logits(part.model, ids)
    if ranks.rank == 1:
        attachment: Attachment = part.communication
        attachment._arm.forwards += 1
    found.append(said(part.communication.check_calls))
    part.communication.reset_stats()
    logits(part.model, ids)
    return [*found, said(part.communication.check_calls)]


def one_layer(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> list[str]:
    """What a row-parallel layer says that is called by itself, before and after a forward pass."""
    part = fresh(ranks, config)
    layer = part.model.get_submodule("model.layers.0.mlp.down_proj")
    x = torch.ones(2 + ranks.rank, layer.in_features, dtype=layer.weight.dtype)  # gloo ends a process for this
    with torch.inference_mode():
        return [said(lambda: layer(x)), said(lambda: logits(part.model, ids)), said(lambda: layer(x))]


def _reused(caches: list[Any], edit: str, mine: bool) -> Any:
    """A cache after an edit, of which there are two that give a cache of the same sizes."""
    cache, rows = caches[0], torch.arange(caches[0].layers[0].keys.shape[0])
    if edit == "another":
        return caches[mine]
    if edit == "deepcopy":
        return copy.deepcopy(caches[mine])
    if edit == "pickle":
        return pickle.loads(pickle.dumps(caches[mine]))
    if edit == "copy of an edited one":
        cache.reorder_cache(rows.flip(0) if mine else rows)
        return copy.deepcopy(cache)
    if edit == "reorder_cache":
        cache.reorder_cache(rows.flip(0) if mine else rows)
    elif edit == "batch_select_indices":
        cache.batch_select_indices(rows.flip(0) if mine else rows)
    elif edit == "batch_repeat_interleave":
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(rows if mine else rows * 2)
    elif edit == "crop":  # then the length is no sign
        cache.crop(-3 if mine else -2)
        cache.crop(-2 if mine else -3)
    elif edit == "one layer":
        cache.layers[0].reorder_cache(rows.flip(0) if mine else rows)
    return cache


def continued(model: torch.nn.Module, ids: torch.Tensor, edit: str, mine: bool) -> torch.Tensor:
    """Logits of three tokens after a cache that an edit has gone through."""
    with torch.inference_mode():
        caches = [model(input_ids=given, use_cache=True).past_key_values for given in (ids, ids.flip(0))]
        cache = _reused(caches, edit, mine)
        logits: torch.Tensor = model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True).logits
    return logits


def edited(ranks: Ranks, config: ModelConfig, ids: torch.Tensor, edit: str) -> tuple[str, list[torch.Tensor]]:
    """What a pass says after an edit on rank 1 alone, and its logits after either edit on all ranks."""
    part = fresh(ranks, config)
    text = said(lambda: continued(part.model, ids, edit, ranks.rank == 1))
    return text, [continued(part.model, ids, edit, mine) for mine in (False, True)]


def unknown_caches(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> dict[str, str]:
    """What a pass says to caches whose keys came from nobody knows where, on all ranks, and on rank 1 alone."""
    part, found = fresh(ranks, config), {}

    def cached() -> Any:
        with torch.inference_mode():
            return part.model(input_ids=ids, use_cache=True).past_key_values

    def go_on(cache: Any) -> str:
        with torch.inference_mode():
            return said(lambda: part.model(input_ids=ids[:, :3], past_key_values=cache))

    made, cache = DynamicCache(), cached()
    for index, layer in enumerate(cache.layers):
        made.update(layer.keys, layer.values, index)
    found["made by hand"] = go_on(made)
    found["made by hand on rank 1"] = go_on(made if ranks.rank == 1 else cache)
    cache.update(layer.keys, layer.values, 0)
    found["written to by hand"] = go_on(cache)
    cache = cached()
    hook = part.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    found["given up"] = go_on(cache)
    hook.remove()
    found["of a pass that was given up"] = go_on(cache)
    cache = cached()
    with torch.inference_mode():
        part.model(input_ids=ids[:, :3], past_key_values=cache, use_cache=False)
    found["without use_cache"] = go_on(cache)
    with torch.inference_mode():
        cache.reset()
    return found | {"emptied": go_on(cache), "empty": go_on(DynamicCache())}


def other_arguments(ranks: Ranks, config: ModelConfig, ids: torch.Tensor, arguments: list[dict[str, Any]]) -> list[str]:
    """What a pass says when rank 1 gives each of these arguments and the others do not; the last one gives them all."""
    part = fresh(ranks, config)
    with torch.inference_mode():
        alone = [said(lambda more=more: part.model(ids, **more if ranks.rank == 1 else {})) for more in arguments]
        return [*alone, *(said(lambda more=more: part.model(input_ids=ids, **more)) for more in arguments)]


def within_a_pass(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> dict[str, str]:
    """What rank 1 hears that calls a method within a forward pass, and whether all go on."""
    part, found = fresh(ranks, config), {}
    communication, model = part.communication, part.model

    def use() -> None:
        with communication.using("int8"):
            pass

    calls = {
        "set_comm": lambda: communication.set_comm("int8"),
        "using": use,
        "counts": communication.counts,
        "stats": communication.stats,
        "check_calls": communication.check_calls,
        "reset_stats": communication.reset_stats,
        "the model": lambda: model(input_ids=ids),
        "its decoder": lambda: model.model(input_ids=ids),
    }
    before = logits(model, ids)
    communication.reset_stats()
    for name, call in calls.items():
        texts: list[str] = []
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_, call=call, to=texts: to.append(said(call)))
        if ranks.rank == 0:
            hook.remove()
        found[name] = f"{torch.equal(logits(model, ids), before)} {' '.join(texts)}"
        hook.remove()
    communication.check_calls()
    return found | {"after": said(lambda: communication.set_comm("int8"))}


def closed_within(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> list[str]:
    """What a pass says in which all ranks close the communication, and the next one."""
    part = fresh(ranks, config)
    part.model.model.layers[1].register_forward_pre_hook(lambda *_: part.communication.close())
    return [said(lambda: logits(part.model, ids)) for _ in range(2)]


def refused_once(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> list[str]:
    """What the check of the calls says after a pass, a refused pass, one given up by all ranks and another pass."""
    part, found = fresh(ranks, config), []
    logits(part.model, ids)
    found.append(said(lambda: logits(part.model, ids + ranks.rank)))
    logits(part.model, ids)
    found.append(said(part.communication.check_calls))
    return [*found, str(part.communication.stats().forwards)]


def beams(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    """What beam search, which reorders its cache at each step, continues a text with."""
    return searched(fresh(ranks, config).model, ids)


def searched(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Tokens of beam search."""
    with torch.inference_mode():
        tokens: torch.Tensor = model.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return tokens


def loaded(ranks: Ranks, config: ModelConfig, wrong: bool) -> tuple[str, SelfCheck | None]:
    """What loading says, and what its check has found; `wrong`: rank 1 takes rank 0's part."""
    own, found = tensor_parallel.shard_, list[TensorParallel]()
    if wrong:
        tensor_parallel.shard_ = lambda model, split, rank: own(model, split, 0)
    try:
        text = said(lambda: found.append(fresh(ranks, config)))
    finally:
        tensor_parallel.shard_ = own
    return text, found[0].check if found else None
