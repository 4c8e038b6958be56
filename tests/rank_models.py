"""What ranks, and the emulator beside them, do in tests of models: the same numbers by the same functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fc_eval.collective.comm import parse_comm
from fc_eval.collective.ranks import Ranks
from fc_eval.models.config import ModelConfig
from fc_eval.parallel.emulate import Attachment, communicate
from fc_eval.parallel.policy import Policy, Rule
from fc_eval.quantized import load
from fc_eval.tensor_parallel import TensorParallel, load_tensor_parallel, part_of

# Two policies with the same comms, in the same order, at other layers.
FIRST_INT8, SECOND_INT8 = ((Rule(f"*.{layer}.mlp.down_proj", parse_comm("int8")),) for layer in range(2))
PARTS: dict[tuple[object, ...], TensorParallel] = {}


@contextmanager
def layer_outputs(model: torch.nn.Module, attachment: Attachment) -> Iterator[list[torch.Tensor]]:
    """The output of every row-parallel layer, in the order of the calls."""
    found: list[torch.Tensor] = []
    hooks = [
        model.get_submodule(site.name).register_forward_hook(lambda m, args, output: found.append(output.clone()))
        for site in attachment.sites
    ]
    yield found
    for hook in hooks:
        hook.remove()


def measured(model: Any, attachment: Attachment, comms: list[str], ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Under each comm in turn: every reduced tensor, the logits, and what was counted; the weights stay."""
    results = {}
    for comm in comms:
        attachment.set_comm(comm)
        with torch.inference_mode(), layer_outputs(model, attachment) as layers:
            logits = model(input_ids=ids, use_cache=False).logits.clone()
        attachment.check_calls()
        results[comm] = {"layers": [x.cpu() for x in layers], "logits": logits.cpu(), "stats": attachment.stats()}
    return results


def part(
    ranks: Ranks,
    config: ModelConfig,
    plan: str,
    reducer: str = "torch",
    codec: str = "reference",
    device: str = "cpu",
) -> TensorParallel:
    """This rank's part, loaded once for all tests that ask for it."""
    key = (ranks.world_size, config, plan, reducer, codec, device)
    if key not in PARTS:
        PARTS[key] = part_of(config, ranks, "int4", device=device, plan=plan, reducer=reducer, codec=codec)
    return PARTS[key]


def real(
    ranks: Ranks,
    config: ModelConfig,
    plan: str,
    comms: list[str],
    ids: torch.Tensor,
    reducer: str = "torch",
    codec: str = "reference",
    device: str = "cpu",
) -> dict[str, dict[str, Any]]:
    """On real ranks."""
    place = f"cuda:{ranks.rank}" if device == "cuda" else device
    found = part(ranks, config, plan, reducer, codec, place)
    return measured(found.model, found.communication, comms, ids.to(place))


def emulated(
    config: ModelConfig,
    tp: int,
    plan: str,
    comms: list[str],
    ids: torch.Tensor,
    codec: str = "reference",
    device: str = "cpu",
) -> dict[str, dict[str, Any]]:
    """In one process."""
    model = load(config, device).model
    with communicate(model, comms[0], tp, codec, plan) as attachment:
        return measured(model, attachment, comms, ids.to(device))


def load_error(ranks: Ranks, config: ModelConfig, plan: str, **options: Any) -> tuple[str, str]:
    """Name and text of what loading raises, although no weights can be read."""
    import fc_eval.models.load as load

    def read(*args: object) -> None:
        raise AssertionError("weights were read")

    kept, load._load_weights = load._load_weights, read
    try:
        part_of(config, ranks, "int4", device="cpu", plan=plan, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        load._load_weights = kept
    return "nothing", ""


def differing(ranks: Ranks, config: ModelConfig, plan: str, ids: torch.Tensor, difference: str) -> list[str]:
    """One rank differs in its data, shape or comm; what each step says, and that the next ones work."""
    found = part(ranks, config, plan)
    said = []
    with torch.inference_mode():
        for odd in (True, False):
            mine = ids.clone()
            found.communication.set_comm("int4")
            caches = [found.model(input_ids=(ids + k) % 8, use_cache=True).past_key_values for k in range(2)]
            inputs = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(ids.shape[1])[None]}
            cached = {}
            if difference == "cache":
                inputs, cached = {}, {"past_key_values": caches[odd and ranks.rank == 1], "use_cache": True}
            call = found.model
            if odd and ranks.rank == 1:
                if difference == "data":
                    mine[1, 3] += 1
                elif difference == "shape":
                    mine, inputs = mine[:, :-1], {}
                elif difference == "comm":
                    found.communication.set_comm("int8")
                elif difference == "policy":
                    found.communication.set_comm(Policy(parse_comm("int4"), SECOND_INT8))
                elif difference == "mask":
                    inputs["attention_mask"][0, 0] = 0
                elif difference == "positions":
                    inputs["position_ids"] = inputs["position_ids"] + 1
                elif difference == "step":
                    call = found.communication.counts
            elif odd and difference == "policy":
                found.communication.set_comm(Policy(parse_comm("int4"), FIRST_INT8))
            try:
                call(**({} if call is not found.model else {"input_ids": mine, "use_cache": False} | inputs | cached))
                said.append("fine")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def corrupted(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> str:
    """One rank's weights change under its feet; what the check of the calls says."""
    found = part_of(config, ranks, "int4", device="cpu", plan="full", codec="reference")
    if ranks.rank == 1:
        found.model.get_submodule("model.norm").weight.data[0] += 1
    with torch.inference_mode():
        found.model(input_ids=ids, use_cache=False)
    try:
        found.communication.check_calls()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def stop_early(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> None:
    """Rank 1 makes one forward pass less than the others."""
    found = part_of(config, ranks, "int4", device="cpu", plan="full", codec="reference")
    with torch.inference_mode():
        for _ in range(2 - (ranks.rank == 1)):
            found.model(input_ids=ids, use_cache=False)
    if ranks.rank == 1:
        import time

        time.sleep(60)


def evaluated(model: Any, attachment: Attachment, spec: Any, batch_size: int, tokenizer: Any = None) -> dict[str, Any]:
    """One evaluation of the model as it communicates now, in a form that compares."""
    from fc_eval.evaluate.run import evaluate
    from fc_eval.models.tiny import byte_tokenizer

    attachment.reset_stats()
    tokenizer, add_bos = tokenizer or byte_tokenizer(), tokenizer is None
    result = evaluate(model, tokenizer, spec, data_root=None, add_bos_token=add_bos, batch_size=batch_size)
    attachment.check_calls()
    arrays = {key: array.tolist() for key, array in (result.arrays or {}).items()}
    return {"metrics": result.metrics, "rows": result.rows, "arrays": arrays, "stats": attachment.stats()}


def evaluated_by_ranks(ranks: Ranks, config: ModelConfig, plan: str, comm: str, spec: Any) -> dict[str, Any]:
    """The same on real ranks."""
    found = part(ranks, config, plan)
    found.communication.set_comm(comm)
    return evaluated(found.model, found.communication, spec, 3)


def two_groups(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> list[torch.Tensor]:
    """In a world of 4: ranks 0, 1 and ranks 2, 3 share a model each, then 0, 2 and 1, 3 another one; logits of both.

    Both are in this process at the same time, and take turns.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    mine = [groups[rank // 2], groups[2 + rank % 2]]
    found = [
        load_tensor_parallel(config, 2, comm, device="cpu", codec="reference", group=group)
        for group, comm in zip(mine, ("int4", "one_step:int6-g32"), strict=True)
    ]
    with torch.inference_mode():
        first = [one.model(input_ids=ids, use_cache=False).logits for one in found]
        second = [one.model(input_ids=ids, use_cache=False).logits for one in found]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    return first


def compared(
    ranks: Ranks,
    config: ModelConfig,
    plan: str,
    comms: list[str],
    ids: torch.Tensor,
    expected: dict[str, dict[str, Any]],
    spec: Any,
    evaluation: dict[str, Any],
) -> str:
    """Whether this rank gets the same tensors, logits, counts and evaluation; otherwise the first difference."""
    found = part_of(config, ranks, comms[0], device="cpu", plan=plan)
    results = measured(found.model, found.communication, comms, ids)
    for comm, values in expected.items():
        pairs = zip(results[comm]["layers"], values["layers"], strict=True)
        for index, (one, other) in enumerate(pairs):
            if not torch.equal(one, other):
                return f"{comm}: call {index} of a row-parallel layer differs"
        if not torch.equal(results[comm]["logits"], values["logits"]):
            return f"{comm}: logits differ"
        if results[comm]["stats"] != values["stats"]:
            return f"{comm}: {results[comm]['stats']} instead of {values['stats']}"
    found.communication.set_comm(comms[0])
    mine = evaluated(found.model, found.communication, spec, 1, found.tokenizer)
    return "the same" if mine == evaluation else f"{mine['metrics']} instead of {evaluation['metrics']}"


def in_consecutive_groups(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a world cut into pairs."""
    found = load_tensor_parallel(config, 2, "int4", device="cpu", codec="reference")
    with torch.inference_mode():
        logits: torch.Tensor = found.model(input_ids=ids, use_cache=False).logits
    found.communication.check_calls()
    return logits


def load_in_world(ranks: Ranks, config: ModelConfig, tp: int) -> str:
    """What loading in the whole world says."""
    try:
        load_tensor_parallel(config, tp, device="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def beside_transformers(ranks: Ranks, config: ModelConfig, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits under `plain`, split by this package and by transformers itself."""
    import os

    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    found = part_of(config, ranks, "plain", device="cpu", plan="full")
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world_size)}
    own_split = DistributedConfig(tp_plan="auto", tp_size=2)
    peer = AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32, distributed_config=own_split)
    with torch.inference_mode():
        both = [model(input_ids=ids, use_cache=False).logits for model in (found.model, peer.eval())]
    return both[0], both[1]
