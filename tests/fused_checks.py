"""What the ranks of a group do in tests of the fused all-reduce between processes; see rank_group.py."""

import os
import random
import signal

import torch

from fc_eval.codec.select import get_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.collective.communicator import Communicator
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.reducers import get_reducer
from fc_eval.errors import FcEvalError, LostProcessError

# Calls that follow each other in any order: their inboxes, owners, formats and algorithms are not the same.
CALLS = [
    ("int4-g32", 40, 96, torch.bfloat16),
    ("one_step:int2-g32", 3, 1024, torch.float16),
    ("int4", 1, 1, torch.float32),
    ("one_step:int8-g32", 17, 1024, torch.bfloat16),
    ("int4_int8", 300, 4096, torch.bfloat16),
    ("mxfp4/mxfp8_e4m3", 33, 576, torch.bfloat16),
    ("one_step:int5-g64-sym", 512, 1024, torch.bfloat16),
]


def drawn(world_size: int, tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Partial sums [W, T, H] of all ranks, the same on each of them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(world_size, tokens, hidden, generator=generator, device="cuda").to(dtype)


def emulated(name: str, partials: torch.Tensor) -> torch.Tensor:
    """The emulator's values [T, H], computed where the partial sums are."""
    comm = parse_comm(name)
    return all_reduce(partials, comm, get_codec("auto", comm.formats, partials.dtype, partials.device)[0]).values


def differing(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How many bytes differ, on the device."""
    return (found.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum()


def communicator_of(ranks: Ranks, transport: str, **options: float) -> Communicator:
    """On this process's GPU."""
    return Communicator.between(ranks, torch.device("cuda", torch.cuda.current_device()), transport, **options)


def every_case(ranks: Ranks, name: str, cases: list[tuple[str, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """Each case by the reducer `fused` or `staged`: values and share of non-finite groups."""
    reducer = get_reducer(name, ranks, torch.device("cuda"))
    assert reducer.name == name
    found = []
    for comm_name, partials_WTH in cases:
        comm, own = parse_comm(comm_name), partials_WTH[ranks.rank].to("cuda")
        reduced = reducer(own, comm, get_codec("auto", comm.formats, own.dtype, own.device)[0])
        found.append((reduced.values.cpu(), reduced.nonfinite_groups.cpu()))
        reducer.check()
    return found


def many_calls(ranks: Ranks, transport: str, count: int) -> int:
    """Calls in an order drawn anew, one rank late at random, no host waits between them; how many bytes differ."""
    communicator = communicator_of(ranks, transport)
    cases = []
    for seed, (name, tokens, hidden, dtype) in enumerate(CALLS):
        everyones = drawn(ranks.world_size, tokens, hidden, dtype, seed)
        cases.append((parse_comm(name), everyones[ranks.rank].contiguous(), emulated(name, everyones)))
    order, late = random.Random(0), random.Random(ranks.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(count):
        comm, own, expected = order.choice(cases)
        if ranks.rank == ranks.world_size - 1 and late.random() < 0.02:
            torch.cuda._sleep(200_000)  # cycles, 0.1 ms
        wrong += differing(communicator.all_reduce(own, comm)[0], expected)
    torch.cuda.synchronize()
    communicator.check()
    ranks.gather(None)
    communicator.close()
    return int(wrong)


def graph_replays(ranks: Ranks, transport: str, replays: int) -> int:
    """A graph of three calls, replayed with new data each time; bytes that differ from the emulator's."""
    communicator = communicator_of(ranks, transport)
    calls = [CALLS[0], CALLS[3], CALLS[4]]
    own = [torch.empty(tokens, hidden, dtype=dtype, device="cuda") for _, tokens, hidden, dtype in calls]
    for (name, *_), values in zip(calls, own, strict=True):
        communicator.all_reduce(values.zero_(), parse_comm(name))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [
            communicator.all_reduce(values, parse_comm(name))[0] for (name, *_), values in zip(calls, own, strict=True)
        ]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(replays):
        everyones = [
            drawn(ranks.world_size, tokens, hidden, dtype, 10 * turn + i)
            for i, (_, tokens, hidden, dtype) in enumerate(calls)
        ]
        for values, partials in zip(own, everyones, strict=True):
            values.copy_(partials[ranks.rank])
        graph.replay()
        for (name, *_), found, partials in zip(calls, outputs, everyones, strict=True):
            wrong += differing(found, emulated(name, partials))
    torch.cuda.synchronize()
    communicator.check()
    ranks.gather(None)
    communicator.close()
    return int(wrong)


def without_rank_1(ranks: Ranks, transport: str, ending: str) -> str:
    """Rank 1 dies, or makes another call, when rank 0 reduces; what rank 0 is told."""
    communicator = communicator_of(ranks, transport, deadline_s=3.0)
    if ranks.rank == 1 and ending == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    tokens = 8 if ranks.rank == 1 else 9
    values, _ = communicator.all_reduce(torch.ones(tokens, 512, device="cuda"), parse_comm("int4-g32"))
    torch.cuda.synchronize()
    assert values.isnan().all()
    try:
        communicator.check()
    except (FcEvalError, LostProcessError) as error:
        return str(error)
    return "nothing"
