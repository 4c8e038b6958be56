"""Real tensor parallelism: each process of a group holds its part of a model, and reduces with the others.

    torchrun --nproc-per-node 2 script.py

    part = fc_eval.load_tensor_parallel("FOLDER_OR_GGUF", tp=2, comm="int4")
    with torch.no_grad():
        part.model(input_ids)  # the same logits on every rank
    part.communication.set_comm("int8")  # another arm, the same weights

The model is loaded as always and then cut in place, by its own plan (`fc_eval.parallel.split`), with the same code for
every source of weights and every version of transformers; so any group of ranks will do, and several of them.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fc_eval.collective.comm import BASELINE, Comm, parse_comm
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.reducers import EMULATES
from fc_eval.errors import FcEvalError, LostProcessError
from fc_eval.models.config import ModelConfig
from fc_eval.models.half_products import half_products
from fc_eval.models.load import LoadedModel, load_model
from fc_eval.parallel.policy import Policy
from fc_eval.parallel.rank_attachment import RankAttachment
from fc_eval.parallel.self_check import SelfCheck, check_logits, compare, split_sensitivity
from fc_eval.parallel.shard import shard_
from fc_eval.parallel.sites import find_decoder
from fc_eval.parallel.split import Split, find_split
from fc_eval.quantized import quantize_, smoothed
from fc_eval.weights.linear import keep_scales_

TIMEOUT_S = 600.0
SAMPLED = 64  # values of each weight that ranks compare
# A model that fits on the device is checked there against itself unsplit; beside it a few layers' activations fit.
FITS = 0.9
# A model checked on another kind of device rounds every operation otherwise: about eight per row-parallel layer.
OTHER_DEVICE_SLACK = 3.0


@dataclass(frozen=True)
class TensorParallel:
    """One rank's part of a model.

    Attributes:
        loaded: the part, its tokenizer and where they came from.
        communication: switches the comm, counts calls and bytes; all ranks call its methods together.
        check: how far the split model is from the unsplit one.
    """

    loaded: LoadedModel
    communication: RankAttachment
    check: SelfCheck

    @property
    def model(self) -> PreTrainedModel:
        """A transformers model that gives the same logits on every rank."""
        return self.loaded.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return self.loaded.tokenizer


def load_tensor_parallel(
    path: str | Path | ModelConfig,
    tp: int,
    comm: str | Comm | Policy = "int4",
    *,
    plan: str = "full",
    reducer: str = "auto",
    codec: str = "auto",
    dtype: str = "bf16",
    device: str | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    data_root: str | Path | None = None,
) -> TensorParallel:
    """Loads this process's part of a model; called by all processes of a torchrun at the same place.

    Args:
        path: a folder with config.json, safetensors and a tokenizer, a .gguf file, or a `ModelConfig`.
        tp: W, ranks that share a model. In a larger world consecutive ranks form groups, each with a model of its own.
        comm: one comm for all layers (a `Comm` or its name), or a policy.
        plan: 'full', or 'row_only' where W does not divide the heads.
        reducer: 'torch' (wire bytes over torch.distributed), 'gathered' (the emulator in the loop), 'fused',
            'staged' (fused through memory of the host), or 'auto'.
        codec: 'auto', 'reference', 'cpu' or 'cuda'; all give the same bits.
        dtype: 'bf16', 'fp16' or 'fp32'; not read where `path` is a `ModelConfig`.
        device: 'cpu', 'cuda' (the GPU of the local rank), or one GPU by name; None takes a GPU where there is one.
        group: the W processes of this group, where they are not consecutive ones; only they call this function then.
        timeout_s: the longest wait for another rank in seconds; a given group has its own.
        data_root: folder that mirrors dataset ids, for the text that weights=w8a8 is smoothed over; None for the Hub.

    Raises:
        FcEvalError: no torchrun around, W does not fit the world or the model, or anything that `load_model` refuses.
        LostProcessError: another rank has ended, or has not come in time.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if group is None:
        group = consecutive_group(tp, place.type, timeout_s)
    if dist.get_rank(group) < 0:
        raise FcEvalError("this process is not in the given group: only its members call load_tensor_parallel")
    if dist.get_world_size(group) != tp:
        raise FcEvalError(f"the group has {dist.get_world_size(group)} ranks, but tp={tp}: they must be the same")
    config = path if isinstance(path, ModelConfig) else ModelConfig(Path(path).stem, path=str(path), dtype=dtype)
    options = {"plan": plan, "reducer": reducer, "codec": codec}
    return part_of(config, Ranks(group), comm, device=str(place), data_root=data_root, **options)


def consecutive_group(tp: int, device_type: str, timeout_s: float) -> dist.ProcessGroup:
    """This process's group, when the world is cut into runs of `tp` ranks; all processes of the world call this.

    Raises:
        FcEvalError: no torchrun around, or `tp` does not divide the world.
        LostProcessError: another process of the world has ended, or has not come in time.
    """
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            raise FcEvalError(
                f"this process is not one of several: start the script with torchrun --nproc-per-node {tp}, "
                "or let fc-eval run exec=tp do it"
            )
        with _joining():
            dist.init_process_group(backend, timeout=timeout)
    world = dist.get_world_size()
    if tp < 1 or world % tp:
        raise FcEvalError(f"tp={tp} does not divide the {world} processes of this world: start a multiple of {tp}")
    own: dist.ProcessGroup | None = None
    for first in range(0, world, tp):  # every process makes every group, in the same order
        with _joining():
            group = dist.new_group(list(range(first, first + tp)), timeout=timeout, backend=backend)
        if first <= dist.get_rank() < first + tp:
            own = group
    assert own is not None
    return own


@contextmanager
def _joining() -> Iterator[None]:
    """Turns what torch raises when processes do not find each other into one sentence."""
    try:
        yield
    except ValueError as error:
        raise FcEvalError(f"this process cannot join the others ({error}): start the script with torchrun") from error
    except RuntimeError as error:  # torch has no narrower type for all of it
        raise LostProcessError(
            "this process waited for the others of its world to make a group, and one of them has ended or did not "
            f"come in time: {str(error).splitlines()[0]}"
        ) from error


def part_of(
    config: ModelConfig,
    ranks: Ranks,
    comm: str | Comm | Policy,
    *,
    device: str,
    plan: str,
    reducer: str = "auto",
    codec: str = "auto",
    data_root: str | Path | None = None,
) -> TensorParallel:
    """This rank's part of a model, checked against the whole one.

    Raises:
        FcEvalError: W does not fit the model, real ranks cannot send what a comm sends, the ranks have different
            models, the split model computes something else, or as `load_model`.
        LostProcessError: another rank has ended, or has not come in time.
    """
    if config.device_map:
        raise FcEvalError(
            f"model.device_map={config.device_map} and tensor parallelism do not go together: a rank has one device; "
            "leave out model.device_map"
        )
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise FcEvalError(f"device={device} is not possible: torch sees no CUDA device here; use device=cpu")
        torch.cuda.set_device(device)
    if reducer != EMULATES:
        rules = comm.rules if isinstance(comm, Policy) else ()
        default = comm.default if isinstance(comm, Policy) else parse_comm(comm)
        for one in (default, *(rule.comm for rule in rules)):
            one.check_between_ranks()
    found: list[tuple[Split, str]] = []

    def before_weights(model: PreTrainedModel) -> None:
        split = find_split(model, ranks.world_size, plan)
        ranks.agree(
            "loading the model",
            {
                "the model": _sizes(model),
                "plan": plan,
                "the row-parallel layers": split.sites,
                "model.attn_implementation": config.attn_implementation,
            },
        )
        found.append((split, device if _fits(model, device) else "cpu"))

    loaded = load_model(config.unquantized(), "cpu", check=before_weights)
    (split, checked_on), model = found[0], loaded.model
    loaded = smoothed(loaded, config, data_root, on=checked_on)
    ranks.agree("splitting the model", {"the hash of sampled weights": _sampled(model)})
    if config.weights == "w8a8":
        keep_scales_(find_decoder(model))
    with half_products(model):
        # One rank is enough for the whole model's logits: all ranks are compared with each other elsewhere.
        unsplit_TV = check_logits(model.to(checked_on)) if ranks.rank == 0 else None
        if ranks.world_size > 1:
            shard_(model, split, ranks.rank)
        model.to(device)
        communication = RankAttachment(model, comm, split, ranks, codec, reducer)
        with communication.using(BASELINE):
            split_TV = _run(model)
            sensitivity = split_sensitivity(model, communication, seed=ranks.rank)
        quantize_(loaded)
    slack = 1.0 if torch.device(checked_on).type == torch.device(device).type else OTHER_DEVICE_SLACK
    said: SelfCheck | FcEvalError | None = None
    if unsplit_TV is not None:
        said = _compared(unsplit_TV, split_TV.to(unsplit_TV.device), sensitivity, slack)
    said = ranks.gather(said)[0]
    if isinstance(said, FcEvalError):
        raise said
    assert said is not None
    communication.reset_stats()
    return TensorParallel(loaded, communication, said)


def _run(model: PreTrainedModel) -> torch.Tensor:
    try:
        return check_logits(model)
    except LostProcessError:
        raise
    except RuntimeError as error:  # a view or a product whose shapes do not fit, in the model's own code
        raise FcEvalError(
            f"{type(model).__name__} cannot run with a part of its heads ({str(error).splitlines()[0]}): "
            "use plan=row_only, which splits the row-parallel layers alone"
        ) from error


def _compared(
    unsplit_TV: torch.Tensor, split_TV: torch.Tensor, sensitivity: float, slack: float
) -> SelfCheck | FcEvalError:
    try:
        return compare(unsplit_TV, split_TV, sensitivity, slack)
    except FcEvalError as error:
        return error


def _fits(model: PreTrainedModel, device: str) -> bool:
    """Whether the whole model fits into what is free on a device."""
    if torch.device(device).type == "cpu":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return bool(sum(p.numel() * p.element_size() for p in model.parameters()) < FITS * free)


def _sizes(model: PreTrainedModel) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    return f"{type(model).__name__} with {parameters:,} parameters in {next(model.parameters()).dtype}"


def _sampled(model: PreTrainedModel) -> str:
    """The first digits of a hash of a few values of every weight: ranks with other checkpoints have another one."""
    digest = hashlib.sha256()
    for value in model.parameters():
        flat = value.detach().reshape(-1)
        digest.update(flat[:: max(1, len(flat) // SAMPLED)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
