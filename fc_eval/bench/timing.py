"""Times of calls that take turns, so that every one of them sees the same machine: medians, in microseconds.

On a GPU: CUDA events around graph replays (around plain calls where a call allocates), after the clocks have risen.
Every call works on several sets of buffers in turn, which together exceed the caches.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Larger than the caches of most processors; of a GPU it is a multiple of its own L2 cache.
CPU_BYTES_IN_TURN = 256 * 2**20
L2_MULTIPLE = 4
MOST_SETS = 64

ROUNDS, FEWEST_ROUNDS = 30, 3
# What one call may use up before it is left out of further rounds, once it has the fewest.
BUDGET_S = 2.0
WARM_S = 0.3
# A graph of fewer calls would be short beside its own launch.
CALLS_PER_GRAPH = 16


@dataclass(frozen=True)
class Timed:
    """What is timed: calls that do the same on different buffers.

    Attributes:
        calls: one per set of buffers.
        capturable: nothing is allocated and nothing waits, so that a CUDA graph can hold the calls.
    """

    calls: Sequence[Callable[[], object]]
    capturable: bool = True


def sets_of_buffers(nbytes: int, device: torch.device) -> int:
    """How many sets of buffers of `nbytes` each are needed so that none is still in a cache when its turn comes."""
    if device.type == "cuda":
        wanted = L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size
    else:
        wanted = CPU_BYTES_IN_TURN
    return min(MOST_SETS, max(1, -(-wanted // max(nbytes, 1))))


def median_times_us(timed: Sequence[Timed], device: torch.device) -> list[float]:
    """Median time of one call of each, in the order given."""
    bursts = [_Burst(one, device) for one in timed]
    _warm_up(bursts, device)
    for _ in range(ROUNDS):
        waiting = [burst for burst in bursts if len(burst.times_us) < FEWEST_ROUNDS or burst.spent_s < BUDGET_S]
        for burst in waiting:
            burst.run()
        for burst in waiting:
            burst.collect()
    return [statistics.median(burst.times_us) for burst in bursts]


class _Burst:
    """One visit to a `Timed`: on the CPU its next call, on a GPU all of its calls (at least 16 in a graph)."""

    def __init__(self, timed: Timed, device: torch.device) -> None:
        self.times_us: list[float] = []
        self.spent_s = 0.0
        self._turn = 0
        self._cuda = device.type == "cuda"
        self._calls = list(timed.calls)
        if self._cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            if timed.capturable:
                self._calls *= -(-CALLS_PER_GRAPH // len(self._calls))
            self._visit = _graph_of(self._calls) if timed.capturable else self._all_calls

    def _all_calls(self) -> None:
        for call in self._calls:
            call()

    def run(self) -> None:
        if self._cuda:
            start, end = self._events
            start.record()
            self._visit()
            end.record()
            return
        call = self._calls[self._turn % len(self._calls)]
        started = time.perf_counter()
        call()
        self._append(time.perf_counter() - started, calls=1)

    def collect(self) -> None:
        """Waits for the device and takes down the time."""
        if self._cuda:
            start, end = self._events
            end.synchronize()
            self._append(start.elapsed_time(end) / 1e3, calls=len(self._calls))

    def _append(self, seconds: float, calls: int) -> None:
        self._turn += 1
        self.spent_s += seconds
        self.times_us.append(seconds * 1e6 / calls)

    def forget(self) -> None:
        self.times_us.clear()
        self.spent_s = 0.0


def _graph_of(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    for call in calls:  # modules are loaded outside the capture
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _warm_up(bursts: Sequence[_Burst], device: torch.device) -> None:
    """Each burst once, then on a GPU the first of them until the clocks have risen."""
    for burst in bursts:
        burst.run()
        burst.collect()
        burst.forget()
    started = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - started < WARM_S:
        bursts[0].run()
        bursts[0].collect()
    bursts[0].forget()
