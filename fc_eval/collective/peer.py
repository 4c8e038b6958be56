"""The all-reduce of another system, emulated: one algorithm for all of them, after the rules of each (`peer_rules`).

    encode and decode every partial sum -> sum -> [ between islands: again ] -> encode and decode -> every rank
    one step: encode and decode every partial sum -> sum -> every rank

Where the owner of a value keeps the sum that it did not encode, ranks differ. An emulated run has one tensor: it holds
what all ranks but the owner have, and counts the values that the owner has otherwise.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from fc_eval.codec.base import DTYPES, RoundTrip
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.codec.peers.round_trip import round_trip
from fc_eval.codec.peers.table import PeerFormat
from fc_eval.collective.base import Reduced, Traffic
from fc_eval.collective.peer_rules import RULES, PeerMessage, message_of


def reduce_as_peer(partials_WTH: torch.Tensor, fmt: PeerFormat, traffic: Traffic) -> Reduced:
    """Reduces the partial sums [W, T, H] of W >= 2 ranks as the format's system does.

    Args:
        partials_WTH: in bf16, fp16 or fp32; cast to the dtype in which the system sums.
        fmt: the format.
        traffic: what this moves.
    """
    rule, dtype = RULES[fmt.system], partials_WTH.dtype
    world_size, tokens, hidden = partials_WTH.shape
    message = message_of(fmt, world_size, tokens, hidden)
    if not message.values:
        none = torch.zeros(len(traffic.stages), dtype=torch.int64, device=partials_WTH.device)
        return Reduced(partials_WTH[0], traffic, none)
    if message.one_step:
        found = [round_trip(partial.to(DTYPES[rule.sums_in]), fmt, message.group) for partial in partials_WTH]
        total = _sum([each.values for each in found], own_first=False)
        return Reduced(round_to_dtype(total.float(), dtype), traffic, _counted(found).unsqueeze(0))
    sums = [_to_parts(partial.to(DTYPES[rule.sums_in]), message) for partial in partials_WTH]
    counts = []
    for size in (message.node_size, world_size // message.node_size):
        if size > 1:
            received = [round_trip(contribution, fmt, message.group) for contribution in sums]
            counts.append(_counted(received))
            values = [found.values for found in received]
            runs = [values[first : first + size] for first in range(0, len(values), size)]
            sums = [_sum(run, own_first=rule.own_first and message.parts > 1) for run in runs]
    gathered = round_trip(sums[0], fmt, message.group)
    counts.append(gathered.nonfinite_groups)
    held, exact = (round_to_dtype(_from_parts(parts, message).float(), dtype) for parts in (gathered.values, sums[0]))
    differing = ((held != exact) & ~(held.isnan() & exact.isnan())).sum() if rule.exact_own else None
    return Reduced(held.view(tokens, hidden), traffic, torch.stack(counts), differing)


def _counted(received: Sequence[RoundTrip]) -> torch.Tensor:
    """Non-finite groups of all contributions, int64 []."""
    return torch.stack([each.nonfinite_groups for each in received]).sum()


def _to_parts(values_TH: torch.Tensor, message: PeerMessage) -> torch.Tensor:
    """[T, H] flattened, cut and filled up with zeros: [parts, padded]."""
    flat = pad(values_TH.reshape(-1), (0, message.parts * message.part - message.values))
    return pad(flat.view(message.parts, message.part), (0, message.padded - message.part))


def _from_parts(parts: torch.Tensor, message: PeerMessage) -> torch.Tensor:
    """The inverse of `_to_parts`, still flat."""
    return parts[:, : message.part].reshape(-1)[: message.values]


def _sum(values: Sequence[torch.Tensor], own_first: bool) -> torch.Tensor:
    """The sum of contributions [parts, padded], each addition rounded; with `own_first` part p starts at rank p."""
    total = torch.zeros_like(values[0])
    for step in range(len(values)):
        if own_first:
            total += torch.stack([values[(part + step) % len(values)][part] for part in range(len(total))])
        else:
            total += values[step]
    return total
