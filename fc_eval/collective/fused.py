"""The reducer `fused`: one CUDA kernel that encodes, sends, sums and decodes, over memory that the ranks' GPUs share.

It covers two_step and one_step in formats whose groups are a power of two from 32 to 1024 elements, without spikes,
rotation, rounded scales or narrow mx scales. Unquantized comms have nothing to fuse and travel over torch.distributed.
"""

from functools import lru_cache

import torch

from fc_eval.codec.base import DTYPE_NAMES, Codec
from fc_eval.collective.base import Reduced
from fc_eval.collective.comm import Comm
from fc_eval.collective.communicator import Communicator
from fc_eval.collective.distributed import all_reduce
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.traffic import traffic_of
from fc_eval.errors import FcEvalError


class FusedReducer:
    """`fused`, or `staged` where its bytes go through memory of the host: see `fc_eval.collective.reducers.Reducer`."""

    def __init__(self, ranks: Ranks, communicator: Communicator | None) -> None:
        self._ranks, self._communicator = ranks, communicator
        self.name = "staged" if communicator is not None and communicator.staged else "fused"
        self._why_not = lru_cache(self._find_why_not)  # a few comms, dtypes and row lengths, asked for at every call

    def __call__(self, partial_TH: torch.Tensor, comm: Comm, codec: Codec) -> Reduced:
        """The same bits on every rank as every other reducer; this rank's share of the non-finite groups.

        Raises:
            FcEvalError: a comm that the kernel does not cover, tensors that are not on the GPU of this rank, or ranks
                that make different calls.
            LostProcessError: another rank has ended, or has not come in time.
        """
        partial_TH = partial_TH.detach()
        comm = comm.at(len(partial_TH))
        if self._communicator is None or not comm.is_quantized:
            return all_reduce(partial_TH, comm, codec, self._ranks)
        reason = self.why_not(partial_TH, comm)
        if reason is not None:
            raise FcEvalError(f"reducer={self.name} cannot do {comm.name}: {reason}; use reducer=torch")
        traffic = traffic_of(comm, self._ranks.world_size, *partial_TH.shape, DTYPE_NAMES[partial_TH.dtype])
        values, nonfinite = self._communicator.all_reduce(partial_TH, comm)
        for stage in traffic.stages:
            self._ranks.sent[stage.stage] += stage.bytes_per_rank[self._ranks.rank]
        return Reduced(values, traffic, nonfinite)

    def why_not(self, partial_TH: torch.Tensor, comm: Comm) -> str | None:
        """None where this reducer covers a call, otherwise the reason in a few words; the same on every rank."""
        comm = comm.at(len(partial_TH))
        if self._communicator is None or not comm.is_quantized:
            return None
        return self._why_not(comm, partial_TH.dtype, partial_TH.shape[1], partial_TH.device)

    def check(self) -> None:
        """Makes sure that no call has failed; complete once the device is through with them.

        Raises:
            LostProcessError, FcEvalError: as a call.
        """
        if self._communicator is not None:
            self._communicator.check()

    def _find_why_not(self, comm: Comm, dtype: torch.dtype, hidden: int, device: torch.device) -> str | None:
        assert self._communicator is not None
        if device != self._communicator.device:
            return f"it works on {self._communicator.device}, not on {device}"
        return self._communicator.why_not(comm, dtype, hidden)


def make_reducer(ranks: Ranks, transport: str = "auto") -> FusedReducer:
    """The reducer of this rank, on the current CUDA device; all ranks of the group call this together.

    Raises:
        FcEvalError: no GPU or no CUDA extension on some rank, memory that cannot be shared, or W above 8.
        LostProcessError: another rank has ended, or has not come in time.
    """
    if ranks.world_size == 1:
        return FusedReducer(ranks, None)
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return FusedReducer(ranks, Communicator.between(ranks, torch.device("cuda", index), transport))
