"""Real ranks for tests: processes in one world (gloo, with nccl on GPUs), started once, that call functions when told.

A function is called on the first W ranks as `function(ranks, *args)`, with the `Ranks` of those; it must be importable
(defined in a module of tests/), and what it returns must be picklable.
"""

import atexit
import functools
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

WORLD = 8
PRELOAD = ["torch", "torch.distributed", "transformers", "fc_eval.tensor_parallel", "fc_eval.models.tiny", "rank_group"]
ANSWER_S = 300.0


def _serve(rank: int, world: int, device: str, timeout_s: float, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from fc_eval.collective.ranks import Ranks

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)

    timeout = timedelta(seconds=timeout_s)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout, backend=backend) for size in range(1, world + 1)}

    while True:
        try:
            function, size, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(Ranks(groups[size]), *arguments)))
        except BaseException as error:
            print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            pipe.send((False, error))


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


class RankGroup:
    """`world` processes; `run` calls a function on the first W of them and returns what each of them returned."""

    def __init__(self, world: int = WORLD, timeout_s: float = 60, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        folder = tempfile.mkdtemp(prefix="rank_group_")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world, device, timeout_s, f"{folder}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def start(self, size: int, function: Any, *arguments: Any) -> None:
        """Calls a function on the first `size` ranks without waiting for it."""
        for pipe in self._pipes[:size]:
            pipe.send((function, size, arguments))

    def result(self, rank: int) -> tuple[bool, Any]:
        """(True, what a rank returned), or (False, the exception that it raised)."""
        assert self._pipes[rank].poll(ANSWER_S), f"rank {rank} gave no answer within {ANSWER_S} s"
        found: tuple[bool, Any] = self._pipes[rank].recv()
        return found

    def run(self, size: int, function: Any, *arguments: Any) -> list[Any]:
        """What each of the first `size` ranks returned; an exception of one of them is raised here."""
        self.start(size, function, *arguments)
        answers = [self.result(rank) for rank in range(size)]
        for fine, value in answers:
            if not fine:
                raise value
        return [value for _, value in answers]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@functools.cache
def shared_group() -> RankGroup:
    """One group for all test modules of a session; nothing that breaks it may run in it."""
    group = RankGroup()
    atexit.register(group.close)
    return group
