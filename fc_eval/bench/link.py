"""The link between the GPUs of this machine: a copy to the next GPU, and the framework's all-reduces."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fc_eval.collective.ranks import Ranks

SMALL_BYTES, LARGE_BYTES = 4096, 256 << 20
WARM_ROUNDS, ROUNDS = 2, 20


@dataclass(frozen=True)
class LinkTimes:
    """What was measured between W ranks.

    Attributes:
        world_size: W.
        copy_gb_per_s: of a copy from each GPU to the next at the same time, the slowest; None on a CPU.
        small_us: an all-reduce of `SMALL_BYTES`; `large_us` one of `large_bytes`.
    """

    world_size: int
    copy_gb_per_s: float | None
    small_us: float
    large_us: float
    large_bytes: int


def measure_link(ranks: Ranks, device: torch.device, large_bytes: int = LARGE_BYTES, rounds: int = ROUNDS) -> LinkTimes:
    """Times on every rank; the slowest counts. For `in_group`."""

    def all_reduce_us(nbytes: int) -> float:
        values = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        return slowest_us(ranks, device, lambda: ranks.all_reduce_(values), rounds)

    copy_gb_per_s = None
    if device.type == "cuda":
        there = torch.device("cuda", (ranks.rank + 1) % ranks.world_size)
        source = torch.empty(large_bytes, dtype=torch.uint8, device=device)
        target = torch.empty(large_bytes, dtype=torch.uint8, device=there)
        copy_gb_per_s = large_bytes / slowest_us(ranks, device, lambda: target.copy_(source), rounds) / 1e3
    return LinkTimes(
        ranks.world_size, copy_gb_per_s, all_reduce_us(SMALL_BYTES), all_reduce_us(large_bytes), large_bytes
    )


def slowest_us(ranks: Ranks, device: torch.device, call: Callable[[], object], rounds: int) -> float:
    """Median wall time of a call that all ranks begin together, the maximum over ranks."""
    times_us = []
    for turn in range(WARM_ROUNDS + rounds):
        drain(device)
        ranks.gather(None)
        started = time.perf_counter()
        call()
        drain(device)
        if turn >= WARM_ROUNDS:
            times_us.append(1e6 * (time.perf_counter() - started))
    return float(max(ranks.gather(statistics.median(times_us))))


def drain(device: torch.device) -> None:
    """Waits for the queue of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
