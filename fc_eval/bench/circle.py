"""The ranks of a bench of all-reduces: processes with a GPU each, processes that share one, or virtual ranks of one.

W ranks, T tokens, H hidden.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fc_eval.bench.group import in_group
from fc_eval.bench.timing import CALLS_PER_GRAPH, ROUNDS
from fc_eval.collective.communicator import Communicator
from fc_eval.collective.ranks import Ranks
from fc_eval.errors import FcEvalError

WARM_ROUNDS = 5


@dataclass(frozen=True)
class Circle:
    """The ranks as one of their processes sees them.

    Attributes:
        world_size: W.
        ranks: the group; None where all ranks are virtual and in this process.
        communicator: of the fused kernel.
    """

    world_size: int
    ranks: Ranks | None
    communicator: Communicator

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self.communicator.device

    @property
    def has_link(self) -> bool:
        """Whether every rank has a GPU of its own."""
        return self.ranks is not None and self.world_size <= torch.cuda.device_count()

    @property
    def link(self) -> str:
        """What the bytes travel over: 'peer' (GPUs write into each other's memory) or 'staged' (pinned memory of the
        host); with ', one GPU' or ', virtual ranks' where there is no link between GPUs."""
        way = "staged" if self.communicator.staged else "peer"
        return way if self.has_link else f"{way}, {'virtual ranks' if self.ranks is None else 'one GPU'}"

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.ranks is None or self.ranks.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """A picklable value of every process."""
        return [value] if self.ranks is None else self.ranks.gather(value)

    def draw(self, tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """This process's partial sums, [T, H], or [W, T, H] of virtual ranks."""
        first = 0 if self.ranks is None else self.ranks.rank
        count = self.world_size if self.ranks is None else 1
        generator = torch.Generator(self.device).manual_seed(seed * self.world_size + first)
        shape = (count, tokens, hidden)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device).to(dtype)
        return drawn if self.ranks is None else drawn[0]

    def everyones(self, partials: torch.Tensor) -> torch.Tensor:
        """Partial sums of all ranks, [W, T, H]."""
        if self.ranks is None:
            return partials
        if self.has_link:
            raw = partials.view(-1).view(torch.uint8)
            pieces = self.ranks.exchange([raw] * self.world_size, [raw.numel()] * self.world_size, "partials")
            return torch.stack([piece.view(partials.dtype).view_as(partials) for piece in pieces])
        return torch.stack([piece.to(self.device) for piece in self.gather(partials.cpu())])

    def median_us(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median time of one call over replays of a graph of them, the maximum over ranks.

        Every process makes the same number of replays: a budget of its own would leave others waiting.
        """
        calls = list(calls) * -(-CALLS_PER_GRAPH // len(calls))
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        times_us = []
        for turn in range(WARM_ROUNDS + ROUNDS):
            self.gather(None)  # ranks begin together
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= WARM_ROUNDS:
                times_us.append(start.elapsed_time(end) * 1e3 / len(calls))
        return float(max(self.gather(statistics.median(times_us))))


def in_circle(world_size: int, virtual: bool, transport: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 returns of `function(circle, *arguments)`, called on every process of the ranks.

    With transport='staged' NCCL does without peer access, too.

    Raises:
        FcEvalError: no GPU, no peer access, or what the function raises.
    """
    if not torch.cuda.is_available():
        raise FcEvalError("bench allreduce needs a CUDA device, and torch sees none here")
    if virtual:
        device = torch.device("cuda", torch.cuda.current_device())
        communicator = Communicator.virtual(world_size, device, staged=transport == "staged")
        return function(Circle(world_size, None, communicator), *arguments)
    return in_group("cuda", world_size, _between_processes, transport, function, arguments, may_share=True)


def _between_processes(
    ranks: Ranks, device: torch.device, transport: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    if transport == "staged":
        os.environ["NCCL_P2P_DISABLE"] = "1"  # read when NCCL is first used, which is not yet
    communicator = Communicator.between(ranks, device, transport)
    answer = function(Circle(ranks.world_size, ranks, communicator), *arguments)
    ranks.gather(None)  # no rank takes its slab away while another one still writes into it
    communicator.close()
    return answer
