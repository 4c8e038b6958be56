"""How the ranks of a group reduce: four ways to the same bits.

torch      wire bytes over `torch.distributed`, gloo or nccl: real bytes on a real transport
gathered   raw partial sums gathered, then the emulator in every rank: the definition run in the loop
fused      one CUDA kernel that encodes, sends, sums and decodes; staged where there is no peer access
staged     the same kernel, its bytes through pinned memory of the host
auto       fused on GPUs where it covers a comm, torch otherwise
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from fc_eval.codec.base import Codec
from fc_eval.collective import distributed
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.base import Reduced
from fc_eval.collective.comm import Comm
from fc_eval.collective.fused import FusedReducer, make_reducer
from fc_eval.collective.ranks import Ranks
from fc_eval.errors import FcEvalError, LostProcessError, unknown


class Reducer(Protocol):
    """One way to reduce, bound to a group of ranks."""

    @property
    def name(self) -> str:
        """What reduces."""
        ...

    def __call__(self, partial_TH: torch.Tensor, comm: Comm, codec: Codec) -> Reduced:
        """The same values on every rank; `nonfinite_groups` is this rank's share, which adds up over ranks.

        Raises:
            FcEvalError: a comm that this reducer does not cover.
            LostProcessError: another rank has ended, or has not come within the group's timeout.
        """
        ...

    def check(self) -> None:
        """Raises what a call has found out after it had returned, as a call does."""
        ...


class WireReducer:
    """`torch`: encoded bytes travel, decoded values are summed in rank order."""

    name = "torch"

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, partial_TH: torch.Tensor, comm: Comm, codec: Codec) -> Reduced:
        """See `Reducer`."""
        return distributed.all_reduce(partial_TH, comm, codec, self._ranks)

    def check(self) -> None:
        """See `Reducer`; a call waits for all that can fail."""


class GatheredReducer:
    """`gathered`: every rank gets every raw partial sum and emulates the whole all-reduce."""

    name = "gathered"

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, partial_TH: torch.Tensor, comm: Comm, codec: Codec) -> Reduced:
        """See `Reducer`; all non-finite groups are rank 0's share."""
        raw = partial_TH.contiguous().view(-1).view(torch.uint8)
        size = self._ranks.world_size
        everyone = self._ranks.exchange([raw] * size, [raw.numel()] * size, "partials")
        partials_WTH = torch.stack([piece.view(partial_TH.dtype).view_as(partial_TH) for piece in everyone])
        reduced = all_reduce(partials_WTH, comm, codec)
        if self._ranks.rank == 0:
            return reduced
        return Reduced(reduced.values, reduced.traffic, torch.zeros_like(reduced.nonfinite_groups))

    def check(self) -> None:
        """See `Reducer`; a call waits for all that can fail."""


class AutoReducer:
    """`auto` on GPUs: the fused kernel for what it covers, wire bytes over torch.distributed for the rest."""

    def __init__(self, ranks: Ranks, fused: FusedReducer) -> None:
        self._ranks, self._fused, self._wire = ranks, fused, WireReducer(ranks)
        self._left: dict[str, str] = {}  # comms that the kernel does not cover, and why

    @property
    def name(self) -> str:
        """What has reduced so far."""
        return f"{self._fused.name}, torch for {', '.join(self._left)}" if self._left else self._fused.name

    def __call__(self, partial_TH: torch.Tensor, comm: Comm, codec: Codec) -> Reduced:
        """See `Reducer`."""
        reason = self._fused.why_not(partial_TH, comm)
        if reason is None:
            return self._fused(partial_TH, comm, codec)
        if comm.name not in self._left:
            self._left[comm.name] = reason
            _say(self._ranks, f"reducer=auto: torch reduces {comm.name}, the fused kernel does not cover it: {reason}")
        return self._wire(partial_TH, comm, codec)

    def check(self) -> None:
        """See `Reducer`."""
        self._fused.check()


def make_auto(ranks: Ranks, device: torch.device) -> Reducer:
    """`torch` on CPUs; on GPUs the fused kernel where it can work. All ranks call this together."""
    if device.type != "cuda":
        return WireReducer(ranks)
    try:
        return AutoReducer(ranks, make_reducer(ranks))
    except LostProcessError:
        raise
    except FcEvalError as reason:  # on all ranks alike
        _say(ranks, f"reducer=auto: torch reduces everything: {reason}")
        return WireReducer(ranks)


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, file=sys.stderr, flush=True)


REDUCERS: dict[str, Callable[[Ranks], Reducer]] = {
    "fused": make_reducer,
    "staged": partial(make_reducer, transport="staged"),
    "torch": WireReducer,
    "gathered": GatheredReducer,
}
EMULATES = "gathered"  # the one that reduces whatever the emulator does


def get_reducer(name: str, ranks: Ranks, device: torch.device) -> Reducer:
    """The reducer of that name for a group. All ranks call this together.

    Args:
        name: one of `REDUCERS`, or 'auto', which covers every comm.
        ranks: the group.
        device: where this rank computes.

    Raises:
        FcEvalError: an unknown name, or one that cannot work here.
        LostProcessError: another rank has ended, or has not come in time.
    """
    if name not in ("auto", *REDUCERS):
        raise unknown("reducer", name, ["auto", *REDUCERS])
    return make_auto(ranks, device) if name == "auto" else REDUCERS[name](ranks)
