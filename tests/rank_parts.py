"""What ranks do in tests of one rank's part of a model: parts that are copied, closed, saved, or that differ."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from conftest import logits

from fc_eval.collective.ranks import Ranks
from fc_eval.models.config import ModelConfig, TinySpec
from fc_eval.parallel.emulate import Attachment
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
