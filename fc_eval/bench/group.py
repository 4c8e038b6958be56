"""A function on W processes that can reach each other with `torch.distributed`: on GPUs, or on the CPU."""

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fc_eval.collective.ranks import Ranks
from fc_eval.errors import FcEvalError

TIMEOUT_S = 300.0


def in_group(
    device_type: str, world_size: int, function: Callable[..., Any], *arguments: Any, may_share: bool = False
) -> Any:
    """What rank 0 returns of `function(ranks, device, *arguments)`, called on every process.

    Args:
        device_type: 'cuda', where ranks have a GPU each and NCCL, or 'cpu' with gloo.
        world_size: W.
        function: importable by name, since processes are started anew.
        arguments: picklable.
        may_share: whether several ranks may have one GPU, over which NCCL does not reduce.

    Raises:
        FcEvalError: too few GPUs, or what the function raises, with its rank.
    """
    count, needed = torch.cuda.device_count(), 1 if may_share else world_size
    if device_type == "cuda" and count < needed:
        raise FcEvalError(
            f"{world_size} ranks need {needed} CUDA devices, and torch sees {count} here: use a machine with more, "
            "fewer ranks, or device=cpu, whose times say nothing of GPUs"
        )
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="fc_eval_bench_") as folder:
        serve = functools.partial(_serve, device_type, world_size, f"{folder}/store", answers, function, arguments)
        processes = [context.Process(target=serve, args=(rank,)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    fine, answer = (False, "a rank has ended without a word") if answers.empty() else answers.get()
    if not fine:
        raise FcEvalError(f"measuring between {world_size} ranks failed: {answer}")
    return answer


def _serve(
    device_type: str,
    world_size: int,
    store: str,
    answers: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count()) if device_type == "cuda" else torch.device("cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        ranks = Ranks(group)
        answer = function(ranks, device, *arguments)
        ranks.gather(None)  # no rank leaves while another one still measures
        if rank == 0:
            answers.put((True, answer))
    except Exception as error:
        if answers.empty():
            answers.put((False, f"rank {rank}: {error}"))
        raise SystemExit(1) from error
    dist.destroy_process_group()
