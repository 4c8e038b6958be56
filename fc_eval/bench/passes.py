"""What `bench ttft` times: passes that take turns, each a CUDA graph on GPUs; and a sum in symmetric memory.

Launching a layer's two dozen kernels takes longer than a short prompt's arithmetic, so passes are captured on GPUs.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fc_eval.bench.link import drain
from fc_eval.bench.prefill import RankPrefill, Reduce
from fc_eval.collective.comm import Comm
from fc_eval.collective.ranks import Ranks
from fc_eval.predict.rows import PARTS

WARM_ROUNDS, PART_ROUNDS = 2, 3
Way = tuple[Comm, str]  # what reduces, and the algorithm by name


@dataclass(frozen=True)
class Times:
    """Milliseconds of a prefill under one comm, its parts by column."""

    ttft_ms: float
    spread_ms: float
    parts_ms: dict[str, float]


def timed(
    model: RankPrefill,
    ranks: Ranks,
    device: torch.device,
    ids_BS: torch.Tensor,
    reduces: dict[Way, Reduce],
    rounds: int,
    captures: bool,
) -> dict[Way, Times]:
    """Milliseconds of a prefill by way, on the slowest rank, and of its parts on the first rank."""
    plain: dict[Way, Callable[[], object]] = {}
    parted: dict[Way, Callable[[], object]] = {}
    spans: dict[Way, list[tuple[str, Any, Any]]] = {}
    pool = torch.cuda.graph_pool_handle() if captures else None
    for way, reduce in reduces.items():
        plain[way] = parted[way] = partial(_eager, model, ids_BS, reduce)
        if captures:
            plain[way]()  # whatever is set up at the first call
            drain(device)
            plain[way] = captured(model, ids_BS, reduce, pool)
            model.watch.on = True
            parted[way] = captured(model, ids_BS, reduce, pool)
            model.watch.on, spans[way] = False, model.watch.take_spans()
    whole: dict[Way, list[float]] = {way: [] for way in reduces}
    parts: dict[Way, list[dict[str, float]]] = {way: [] for way in reduces}

    def spent_ms(call: Callable[[], object]) -> float:
        drain(device)
        ranks.gather(None)  # ranks begin together
        started = time.perf_counter()
        call()
        drain(device)
        return 1e3 * (time.perf_counter() - started)

    for turn in range(WARM_ROUNDS + rounds):
        for way in reduces:
            taken_ms = spent_ms(plain[way])
            if turn >= WARM_ROUNDS:
                whole[way].append(taken_ms)
    for _ in range(min(PART_ROUNDS, rounds)):
        for way in reduces:
            model.watch.on = not captures
            taken_ms = spent_ms(parted[way])
            model.watch.on = False
            taken = model.watch.sum_ms(spans[way]) if captures else model.watch.take_ms()
            parts[way].append(taken | {"other_ms": taken_ms - sum(taken.values())})
    found = {}
    for way, times in whole.items():
        middle_ms, spread_ms = max(ranks.gather((statistics.median(times), _spread(times))))
        medians = {name: statistics.median(each[name] for each in parts[way]) for name in PARTS}
        found[way] = Times(middle_ms, spread_ms, medians)
    return found


def _eager(model: RankPrefill, ids_BS: torch.Tensor, reduce: Reduce) -> None:
    with torch.inference_mode():
        model(ids_BS, reduce)


def _spread(times: list[float]) -> float:
    """The distance of the quartiles; 0 of a single time."""
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first


def captured(model: RankPrefill, ids_BS: torch.Tensor, reduce: Reduce, pool: Any) -> Callable[[], object]:
    """Replays a pass; `model.watch` decides at capture whether the events of its parts are in the graph.

    Args:
        model: on a GPU.
        ids_BS: of every replay.
        reduce: safe to capture.
        pool: memory that graphs share, since one is replayed at a time.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog, query events meanwhile, which must not end the capture.
    with torch.inference_mode(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        model(ids_BS, reduce)
    return graph.replay


def symmetric_two_shot(ranks: Ranks, rows: int, hidden: int, device: torch.device) -> Reduce | str:
    """PyTorch's two-shot all-reduce of bf16 [rows, hidden], with the copy into its memory; or why there is none.

    All ranks call this together, and all get a reduction or all a reason.
    """
    reason = ""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        shared_TH = symmetric.empty((rows, hidden), dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared_TH, ranks.group.group_name)
        two_shot = torch.ops.symm_mem.two_shot_all_reduce_
    except (ImportError, RuntimeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    reasons = [text for text in ranks.gather(reason) if text]
    if reasons:
        return reasons[0]

    def reduce(partial_TH: torch.Tensor) -> torch.Tensor:
        shared_TH.copy_(partial_TH)
        two_shot(shared_TH, "sum", ranks.group.group_name)
        return shared_TH  # read before the next reduction on the same stream

    return reduce
