"""Spike reserving (FlashCommunication V2, arXiv 2508.03760; WIRE.md, "Spikes"): a group's extremes travel as they are.

Groups are the last dimension of fp32 [T, G, m]; what belongs to a group's two spikes is [T, G, 2]: min, then max.
"""

from typing import NamedTuple

import torch

from fc_eval.codec.canonical import fill_nan_


class Spikes(NamedTuple):
    """The smallest and the largest other element of every group.

    Attributes:
        values: fp32, exact in the dtype of the input, zeros +0; of no meaning in non-finite groups.
        positions: int64 columns inside the group.
    """

    values: torch.Tensor
    positions: torch.Tensor

    def without(self, broken: torch.Tensor) -> "Spikes":
        """What travels where the groups of the mask [T, G, 1] are non-finite: NaN at position 0."""
        return Spikes(fill_nan_(self.values, broken), self.positions.masked_fill(broken, 0))


def take_out_(x: torch.Tensor) -> Spikes:
    """Finds the spikes and puts another element of the group in their places, which changes no extreme of the others.

    Without other elements that is +0. In a group with a NaN or an Inf it is NaN, so that the group stays non-finite.
    """
    finite = x.abs().amax(-1, keepdim=True) < torch.inf
    low = x.argmin(-1, keepdim=True)  # of equal ones the first, as below
    high = low if x.shape[-1] == 1 else x.scatter(-1, low, -torch.inf).argmax(-1, keepdim=True)
    positions = torch.cat([low, high], dim=-1)
    values = x.gather(-1, positions) + 0.0
    if x.shape[-1] > 2:
        # The first element that is not a spike stands at column 0, 1 or 2.
        other = ((low == 0) | (high == 0)).long()
        other += (low == other) | (high == other)
        filler = x.gather(-1, other)
    else:
        filler = torch.zeros_like(x[..., :1])
    x.scatter_(-1, positions, filler.masked_fill(~finite, torch.nan).expand_as(values))
    return Spikes(values, positions)


def put_back_(x: torch.Tensor, spikes: Spikes) -> None:
    """Writes min, then max into decoded groups. Bytes of another origin may name a place outside: it is left out."""
    last = x.shape[-1] - 1
    for side in range(2):
        position = spikes.positions[..., side : side + 1]
        place = position.clamp(max=last)
        value = torch.where(position <= last, spikes.values[..., side : side + 1], x.gather(-1, place))
        x.scatter_(-1, place, value)
