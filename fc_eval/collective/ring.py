"""Ring all-reduce: chunk c, the blocks that rank c owns, passes ranks c+1, c+2, ..., c and grows by one partial each.

The sender rounds the running sum to the input dtype and encodes; the receiver decodes and adds its own unencoded
partial in fp32. The owner encodes once more for the gather: W quantizations, where two-step has two.
"""

from collections.abc import Iterator

import torch

from fc_eval.codec.base import DTYPE_NAMES, Codec
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.collective.comm import Comm
from fc_eval.collective.traffic import owned_elements
from fc_eval.errors import FcEvalError
from fc_eval.wire.layout import layout


def ring(partials_WTH: torch.Tensor, comm: Comm, codec: Codec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Partial sums [W, T, H] to values [T, H] in their dtype, and the non-finite groups of both stages, int64 [].

    Those of the reduce stage are the ones of all hops.

    Raises:
        FcEvalError: a format rotates its rows.
    """
    assert comm.reduce is not None
    assert comm.gather is not None
    if comm.reduce.hadamard or comm.gather.hadamard:
        raise FcEvalError("ring cuts rows at block borders and cannot rotate them: leave out '-had' or use two_step")
    world_size, tokens, hidden = partials_WTH.shape
    shape = layout(comm.reduce, tokens, hidden, DTYPE_NAMES[partials_WTH.dtype])
    values = torch.empty_like(partials_WTH[0])
    counts = torch.zeros(2, dtype=torch.int64, device=partials_WTH.device)
    for chunk in range(world_size):
        for rows, columns in _rectangles(owned_elements(shape, chunk, world_size), hidden):
            piece, found = _around(partials_WTH[:, rows, columns], chunk, comm, codec)
            values[rows, columns] = piece
            counts += found
    return values, list(counts)


def _around(partials_Wth: torch.Tensor, owner: int, comm: Comm, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece of the chunk of rank `owner`: its values, and the non-finite groups of both stages."""
    assert comm.reduce is not None
    assert comm.gather is not None
    world_size, dtype = len(partials_Wth), partials_Wth.dtype
    running = partials_Wth[(owner + 1) % world_size]
    met = torch.zeros((), dtype=torch.int64, device=partials_Wth.device)
    for hop in range(2, world_size + 1):
        received = codec.round_trip(running, comm.reduce)
        running = received.values.add_(partials_Wth[(owner + hop) % world_size]).to(dtype)
        met = met + received.nonfinite_groups
    gathered = codec.round_trip(running, comm.gather)
    return round_to_dtype(gathered.values, dtype), torch.stack([met, gathered.nonfinite_groups])


def _rectangles(elements: range, hidden: int) -> Iterator[tuple[slice, slice]]:
    """A run of flat elements as (rows, columns): the rest of a row, whole rows, the beginning of a row.

    A chunk begins and ends at a group, so every piece holds whole groups of its rows.
    """
    start, stop = elements.start, elements.stop
    while start < stop:
        row, column = divmod(start, hidden)
        if column or stop - start < hidden:
            width = min(hidden - column, stop - start)
            yield slice(row, row + 1), slice(column, column + width)
            start += width
        else:
            rows = (stop - start) // hidden
            yield slice(row, row + rows), slice(0, hidden)
            start += rows * hidden
