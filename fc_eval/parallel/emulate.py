"""Tensor parallelism on one device: every row-parallel layer of a model communicates; everything else runs as it is."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fc_eval.codec.base import DTYPES, Codec
from fc_eval.codec.eager import eager
from fc_eval.codec.select import get_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.collective.traffic import traffic_of
from fc_eval.errors import FcEvalError
from fc_eval.parallel.column_parallel import ColumnParallelForward
from fc_eval.parallel.policy import Policy
from fc_eval.parallel.rank_by_rank import between_columns_and_rows
from fc_eval.parallel.row_parallel import RowParallelForward
from fc_eval.parallel.site import Site
from fc_eval.parallel.sites import find_decoder
from fc_eval.parallel.split import Split, find_split
from fc_eval.parallel.stand_in import StandIn
from fc_eval.parallel.stats import CommStats, Counts, Tally, merged, on_cpu, summarize
from fc_eval.weights.linear import W8A8Linear, activation_dtype

# One layer's all-reduce: the partial sums [W, T, H] of a site to its values [T, H].
Reduce = Callable[[Site, torch.Tensor], torch.Tensor]
# The same, told how the attachment would do it.
Between = Callable[[Site, torch.Tensor, Reduce], torch.Tensor]


@dataclass
class Arm:
    """What is being compared now: the comm of each site, the codec's name, and the counts since the last reset."""

    comms: Mapping[str, Comm]
    codec: str
    tallies: dict[str, Tally] = field(default_factory=dict)
    forwards: int = 0

    def __post_init__(self) -> None:
        self.tallies = {name: Tally() for name in self.comms}


class Attachment:
    """A model whose row-parallel layers communicate; made by `communicate`, and in force inside its `with` block.

    Attributes:
        split: how the model is split.
        sites: the row-parallel layers, in the model's order.
        world_size: W.
    """

    def __init__(self, model: nn.Module, comm: str | Comm | Policy, split: Split, codec: str) -> None:
        self.split, self.sites, self.world_size = split, split.sites, split.world_size
        self._targets = {site.name: plain_linear(model, site.name) for site in self.sites}
        self._codecs: dict[tuple[str, Comm, torch.dtype, torch.device], tuple[Codec, str]] = {}
        self._between: Between | None = None
        self._arm = self._make_arm(comm, codec)

    @property
    def reducer(self) -> str | None:
        """What reduces between real ranks; None where nothing real travels."""
        return None

    @property
    def comms(self) -> dict[str, Comm]:
        """The comm of each site, by full name."""
        return dict(self._arm.comms)

    def set_comm(self, comm: str | Comm | Policy, codec: str | None = None) -> None:
        """Switches to another comm or policy (and codec) without reloading anything, and starts the counts anew.

        Raises:
            FcEvalError: an unknown comm, a policy rule without effect, or a format that the codec does not cover.
        """
        self._arm = self._make_arm(comm, codec or self._arm.codec)

    @contextmanager
    def using(self, comm: str | Comm | Policy, codec: str | None = None) -> Iterator[None]:
        """Another comm for the length of a block; its calls are counted apart and forgotten when it ends.

        Raises:
            FcEvalError: as `set_comm`.
        """
        arm = self._arm
        self._arm = self._make_arm(comm, codec or arm.codec)
        try:
            yield
        finally:
            self._arm = arm

    @contextmanager
    def reducing(self, between: Between) -> Iterator[None]:
        """Lets `between` stand between the layers and their all-reduce for the length of a block, to watch or replace.

        Args:
            between: given the site, its partial sums [W, T, H], and this attachment's own all-reduce, which counts its
                calls; returns what the layer goes on with, [T, H].
        """
        before, self._between = self._between, between
        try:
            yield
        finally:
            self._between = before

    def codec_of(self, comm: Comm, like: torch.Tensor) -> Codec:
        """The codec that encodes tensors of this dtype and device for a comm.

        Raises:
            FcEvalError: a format that the codec does not cover.
        """
        return self._codec(self._arm.codec, comm, like.dtype, like.device)

    def reset_stats(self) -> None:
        """Forgets all counts."""
        self._arm = Arm(self._arm.comms, self._arm.codec)

    def counts(self) -> Counts:
        """What this process counted since the last reset, to be sent to another; waits for the device."""
        return self._arm.forwards, {name: on_cpu(tally) for name, tally in self._arm.tallies.items()}

    def set_counts(self, counts: Iterable[Counts]) -> None:
        """Counts anew from the sum of what several processes counted, each with a model and an attachment like this."""
        self._arm.forwards, self._arm.tallies = merged(counts)

    def stats(self) -> CommStats:
        """What happened since the last reset (`using` blocks left out); waits for the device once per site."""
        arm, comms = self._arm, set(self._arm.comms.values())
        used = [
            chosen
            for (name, comm, _, _), chosen in self._codecs.items()
            if name == arm.codec and comm in comms and comm.is_quantized and self.world_size > 1
        ]
        names, notes = (codec.name for codec, _ in used), (note for _, note in used)
        return summarize(arm.tallies, self.world_size, arm.forwards, names, notes)

    def check_calls(self) -> None:
        """Makes sure that every site was reduced exactly once per forward pass of the text decoder (never at W = 1).

        Raises:
            FcEvalError: no forward pass was seen, or a site was skipped or called more often.
        """
        forwards = self._arm.forwards
        if not forwards:
            raise FcEvalError("no forward pass of the model was seen: evaluate the same model object that communicates")
        wanted = forwards if self.world_size > 1 else 0
        wrong = [name for name, tally in self._arm.tallies.items() if tally.calls.total() != wanted]
        if wrong:
            calls = self._arm.tallies[wrong[0]].calls.total()
            raise FcEvalError(
                f"{len(wrong)} of {len(self.sites)} row-parallel layers were not reduced once per forward pass "
                f"({wrong[0]}: {calls} times in {forwards}), so the results would not show what they claim: "
                "the model skips layers, or something has replaced their forward"
            )

    def _make_arm(self, comm: str | Comm | Policy, codec: str) -> Arm:
        policy = comm if isinstance(comm, Policy) else Policy(parse_comm(comm))
        arm = Arm(policy.assign(self.sites), codec)
        for site in self.sites if self.world_size > 1 else ():
            traffic_of(arm.comms[site.name], self.world_size, 0, site.out_features, "bf16")  # W fits the comm's nodes
        for name, module in self._targets.items():
            if not module.weight.is_meta:  # where an offloaded layer runs is known when it is called
                self._codec(codec, arm.comms[name], activation_dtype(module), module.weight.device)
        return arm

    def _codec(self, name: str, comm: Comm, dtype: torch.dtype, device: torch.device) -> Codec:
        key = (name, comm, dtype, device)
        if key not in self._codecs:
            self._codecs[key] = get_codec(name, comm.formats, dtype, device)
        return self._codecs[key][0]

    def _reduce(self, site: Site, partials_WTH: torch.Tensor) -> torch.Tensor:
        if self._between is None:
            return self._all_reduce(site, partials_WTH)
        return self._between(site, partials_WTH, self._all_reduce)

    def _all_reduce(self, site: Site, partials_WTH: torch.Tensor) -> torch.Tensor:
        comm = self._arm.comms[site.name]
        codec = self._codec(self._arm.codec, comm, partials_WTH.dtype, partials_WTH.device)
        reduced = all_reduce(partials_WTH, comm, codec)
        self._arm.tallies[site.name].add(partials_WTH.shape[1], reduced)
        return reduced.values

    def _forwards(self, model: nn.Module) -> list[StandIn]:
        """What stands in for the layers' own forwards."""
        full, size = self.split.plan == "full", self.world_size
        rows = [RowParallelForward(self._targets[s.name], s, size, self._reduce, contiguous=full) for s in self.sites]
        columns = [(plain_linear(model, name), name) for name in self.split.columns]
        # Sums of INT8 products are exact: a part of the rows gives the bits that the whole weight gives.
        parts = [ColumnParallelForward(m, name, size) for m, name in columns if not isinstance(m, W8A8Linear)]
        return [*rows, *parts, *between_columns_and_rows(model, self.split)]

    @contextmanager
    def _installed(self, model: nn.Module) -> Iterator[None]:
        """Replaces the forwards while the block runs; all of them or none."""
        decoder = find_decoder(model)
        if any(isinstance(hook, _CountForwards) and hook.attachment for hook in decoder._forward_pre_hooks.values()):
            raise FcEvalError("this model communicates already: use set_comm, or leave the other `with` block first")
        # At W = 1 nothing is split: the layers stay untouched.
        forwards = self._forwards(model) if self.world_size > 1 else []
        with ExitStack() as stack:
            stack.callback(decoder.register_forward_pre_hook(_CountForwards(self)).remove)
            for forward in forwards:
                forward.install()
                stack.callback(forward.remove)
            yield


class _CountForwards:
    """Pre-forward hook of the decoder; its presence also marks the model as attached. A copy of it does neither."""

    def __init__(self, attachment: Attachment | None = None) -> None:
        self.attachment = attachment

    @eager
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.attachment is not None:
            self.attachment._arm.forwards += 1

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _CountForwards, ()


def plain_linear(model: nn.Module, name: str) -> nn.Linear:
    """The layer of that name, whose weight is or will be in memory in a dtype that can be communicated."""
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)  # find_sites has made sure
    if (dtype := activation_dtype(module)) not in DTYPES.values():
        raise FcEvalError(f"the weight of {name} is {dtype}: expected {', '.join(DTYPES)}")
    if module.weight.is_meta:
        # An offloaded weight is on the meta device until a hook of the module, or of one around it, brings it in.
        path = name.split(".")
        around = (model.get_submodule(".".join(path[:end])) for end in range(len(path) + 1))
        if not any(hasattr(part, "_hf_hook") for part in around):
            raise FcEvalError(f"the weight of {name} is not in memory (meta device): load the model with its weights")
    return module


@contextmanager
def communicate(
    model: nn.Module, comm: str | Comm | Policy, tp: int, codec: str = "auto", plan: str = "row_only"
) -> Iterator[Attachment]:
    """Lets the row-parallel layers of a transformers model communicate while the block runs.

    Args:
        model: in bf16, fp16 or fp32, evaluated without gradients; it may lie on several devices (accelerate).
        comm: one comm for all layers (a `Comm` or its name), or a policy.
        tp: world size W, a whole number that divides the input of every site; 1 leaves the layers untouched.
        codec: 'auto', 'reference', 'cpu' or 'cuda'; all give the same bits.
        plan: 'row_only' computes everything but the row-parallel layers as the unsplit model does; 'full' computes the
            column-parallel layers, attention and activations rank by rank as well, and every product on contiguous
            slices, so that the numbers are those of real ranks on a CPU, bit for bit; slower, and W has to divide the
            heads.

    Nothing is left behind, whatever happens in the block. A copy or a pickle of the model made inside does not
    communicate. A model compiled with torch.compile runs its row-parallel layers eagerly, with the same bits.

    Yields:
        The attachment: switches the comm, counts calls and bytes.

    Raises:
        FcEvalError: the model, W, comm or codec are not possible, the model or a layer of it communicates already, or
            something else than accelerate has replaced the forward of a row-parallel layer.
    """
    attachment = Attachment(model, comm, find_split(model, tp, plan), codec)
    with attachment._installed(model):
        yield attachment
