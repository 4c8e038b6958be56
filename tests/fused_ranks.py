"""Virtual ranks of the fused all-reduce for tests: on a GPU, and as threads of the CPU that run the same device code.

The CPU has the module `_native_cuda_sim` for that (see simulated_codec.py), always a debug build: ranks can be made
late, and protection be taken away.
"""

import importlib

import torch
from native_cases import same_bits
from simulated_codec import SIMULATED

from fc_eval.codec.format_ints import format_ints
from fc_eval.codec.native import cpu_codec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.collective.communicator import Communicator

# Rounds begin just below the end of 32 bits, so that epochs wrap around in every test.
FIRST_EPOCH = 2**32 - 3
DEADLINE_S = 600.0


def virtual_ranks(where: str, world_size: int, **options) -> Communicator:
    """`where` is 'cuda' or 'simulated'."""
    options = {"first_epoch": FIRST_EPOCH, "deadline_s": DEADLINE_S} | options
    if where == "cuda":
        return Communicator.virtual(world_size, torch.device("cuda", 0), **options)
    module = importlib.import_module(SIMULATED)
    return Communicator(module, torch.device("cpu"), world_size, module.VIRTUAL, **options)


def launch(ranks: Communicator, partials: torch.Tensor, name: str, blocks: int = 0, **mischief):
    """(values [W, T, H], non-finite groups int64 [2]) on the CPU; outputs are poisoned, so that a hole shows."""
    comm, there = parse_comm(name), partials.to(ranks.device).contiguous()
    out, counts = torch.full_like(there, 7.0), torch.zeros(2, dtype=torch.int64, device=there.device)
    formats = [format_ints(f, ranks.module) if f is not None else () for f in (comm.reduce, comm.gather)]
    ranks.launch(there, comm.algorithm, *formats, out, counts, blocks, **mischief)
    return out.cpu(), counts.cpu()


def check(ranks: Communicator, partials: torch.Tensor, name: str, blocks: int = 0, **mischief) -> None:
    """Every rank holds the emulator's bits, and the counts of non-finite groups are the emulator's."""
    values, counts = launch(ranks, partials, name, blocks, **mischief)
    ranks.check()
    expected = all_reduce(partials, parse_comm(name), cpu_codec())
    what = f"{name} {partials.dtype} {tuple(partials.shape)}"
    for rank, found in enumerate(values):
        same_bits(found, expected.values, f"{what}: rank {rank}")
    assert counts[: len(expected.nonfinite_groups)].tolist() == expected.nonfinite_groups.tolist(), what
