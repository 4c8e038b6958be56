"""The ranks of one tensor-parallel group as processes: bytes that really travel, counted, and facts agreed upon.

Everything that an all-reduce sends goes through `Ranks.exchange`, one all-to-all of bytes (gloo on CPUs, nccl on GPUs).
What ranks tell each other about themselves travels in small tensors, on CPUs where the group has gloo.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from fc_eval.errors import FcEvalError, LostProcessError

T = TypeVar("T")


class Ranks:
    """This process among the W ranks of a group; the group's own timeout is the longest wait for another rank.

    Attributes:
        group: any process group of torch; one with gloo and nccl ('cpu:gloo,cuda:nccl') serves GPUs best.
        rank: 0 to W - 1, the rank inside the group.
        world_size: W.
        sent: bytes that this rank sent to others so far, by stage.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        on_cpu = "gloo" in str(dist.get_backend_config(group))
        self._facts_device = torch.device("cpu" if on_cpu else "cuda")

    def exchange(
        self, outgoing: Sequence[torch.Tensor], incoming_bytes: Sequence[int], stage: str
    ) -> list[torch.Tensor]:
        """One all-to-all: piece r of every rank goes to rank r; the piece for oneself stays where it is.

        Args:
            outgoing: uint8 [bytes] for each rank, empty where nothing is sent.
            incoming_bytes: how much each rank sends to this one.
            stage: what the bytes are counted as.

        Returns:
            uint8 [bytes] from each rank.

        Raises:
            LostProcessError: another rank has ended, or has not come within the group's timeout.
        """
        own = self.rank
        if self.world_size == 1:
            return list(outgoing)
        sizes = [0 if rank == own else piece.numel() for rank, piece in enumerate(outgoing)]
        awaited = [0 if rank == own else size for rank, size in enumerate(incoming_bytes)]
        sent = torch.cat([piece for rank, piece in enumerate(outgoing) if rank != own])
        received = sent.new_empty(sum(awaited))
        with self._waiting("an all-reduce"):
            dist.all_to_all_single(received, sent, awaited, sizes, group=self.group)
        self.sent[stage] += sum(sizes)
        pieces = list(torch.split(received, awaited))
        pieces[own] = outgoing[own]
        return pieces

    def all_reduce_(self, values: torch.Tensor) -> torch.Tensor:
        """The framework's own sum over ranks, in place; how it travels is the framework's matter and not counted.

        Raises:
            LostProcessError: as `exchange`.
        """
        with self._waiting("an all-reduce"):
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """The value of every rank, by rank, in every rank; values are pickled.

        Raises:
            FcEvalError: another rank is about to do something else, such as a forward pass.
            LostProcessError: as `exchange`.
        """
        self.agree("a gathering of facts", {})
        return self._gather(value)

    def _gather(self, value: T) -> list[T]:
        gathered: list[T] = [value] * self.world_size
        with self._waiting("a gathering of facts"):
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def agree(self, what: str, facts: Mapping[str, object]) -> None:
        """Makes sure that all ranks are about to do the same; one small exchange while they agree.

        Args:
            what: what is about to be done, such as 'forward pass 3'.
            facts: what must be the same on all ranks, by name and in the same order; compared by their text.

        Raises:
            FcEvalError: ranks differ; names the first difference and both values.
            LostProcessError: as `exchange`.
        """
        # Of one size whatever is agreed upon: ranks that do different things meet here and are told so.
        own = torch.tensor([_digest(what), _digest(list(map(str, facts.values())))], device=self._facts_device)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._waiting(what):
            dist.all_gather(rows, own, group=self.group)
        if all(torch.equal(row, own) for row in rows):
            return
        # Every rank sees the same table, so all of them come here.
        tables = self._gather({"step": what} | {name: str(fact) for name, fact in facts.items()})
        for name in tables[0]:
            for rank, table in enumerate(tables):
                if table.get(name) != tables[0][name]:
                    raise FcEvalError(
                        f"the ranks do not do the same: {name} is {table.get(name)} on rank {rank} and "
                        f"{tables[0][name]} on rank 0; all ranks of a tensor-parallel group call the same methods with "
                        "the same inputs, model and comm"
                    )

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Turns what torch raises for a peer that is gone or late into one sentence."""
        try:
            yield
        except RuntimeError as error:  # torch has no narrower type for it
            raise LostProcessError(
                f"rank {self.rank} of {self.world_size} waited for the others in {what}, and one of them has ended or "
                f"did not come in time: {str(error).splitlines()[0]}"
            ) from error


def _digest(fact: object) -> int:
    """64 bits of a text, as a signed integer."""
    return int.from_bytes(hashlib.sha256(str(fact).encode()).digest()[:8], "little", signed=True)
