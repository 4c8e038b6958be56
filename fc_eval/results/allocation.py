"""Which format each layer gets, so that the cheapest assignment stays within a loss budget. Numbers only.

Loss model: a layer's quantization adds weight[kind of layer] x (mean square error of its output, isolated, over the
mean square of that output) to the mean loss per token, in nats, and layers add up. The weights are fitted to measured
deltas, above all of runs that give every layer the same format. Additive to first order: errors of different layers are
nearly uncorrelated, and what loss they cost grows with their energy while they are small. Over the signal, because
every layer reads a normalized sum of the layers before: by error alone the early layers of a model, whose outputs are
small, get the fewest bits, and SmolLM2 lost 1.07 nats instead of the 0.05 that were predicted.

Solver: of each layer's formats only those on the lower convex hull of loss over cost can be the best at any exchange
rate between the two (Lagrange). Walking from the cheapest assignment along the steepest steps of all hulls gives, at
every step, the optimum for the loss reached there; between two steps at most one step is lost to the optimum, and the
bound says how much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# A fitted delta counts as known to this share of itself at best: the model is no better than that.
MODEL_ERROR = 0.1


@dataclass(frozen=True)
class Option:
    """One format for one layer: its name, what it costs, and the loss that the model predicts for it, in nats."""

    name: str
    cost: float
    loss: float


@dataclass(frozen=True)
class Allocation:
    """An assignment.

    Attributes:
        chosen: of each layer, the option.
        bound: no assignment of these options within the budget costs less than this.
    """

    chosen: tuple[Option, ...]
    bound: float

    @property
    def cost(self) -> float:
        """Sum over layers."""
        return sum(option.cost for option in self.chosen)

    @property
    def loss(self) -> float:
        """Predicted, in nats per token."""
        return sum(option.loss for option in self.chosen)


def fit_weights(energies_RK: Floats, deltas_R: Floats, stderrs_R: Floats) -> tuple[Floats, Floats]:
    """Weights [K], none negative, that make `energies @ weights` the measured deltas as nearly as can be; errors [K].

    The standard error of a weight is that of the least-squares fit; infinite where the weight left the fit.

    Args:
        energies_RK: error energies of R runs, summed over the layers of each of K kinds.
        deltas_R: measured losses of these runs in nats.
        stderrs_R: their standard errors; residuals count in units of these, or of `MODEL_ERROR` of the delta.
    """
    scale_R = np.hypot(stderrs_R, MODEL_ERROR * deltas_R)
    a_RK, b_R = energies_RK / scale_R[:, None], deltas_R / scale_R
    kept = list(range(a_RK.shape[1]))
    weights_K, errors_K = np.zeros(a_RK.shape[1]), np.full(a_RK.shape[1], np.inf)
    while kept:  # a weight below zero leaves the fit, which for a few kinds of layers is the non-negative optimum
        found = np.linalg.lstsq(a_RK[:, kept], b_R, rcond=None)[0]
        if (found >= 0).all():
            weights_K[kept] = found
            errors_K[kept] = np.sqrt(np.diag(np.linalg.pinv(a_RK[:, kept].T @ a_RK[:, kept])))
            break
        kept.pop(int(found.argmin()))
    return weights_K, errors_K


def hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of loss over cost, from the cheapest on; each costs more and loses less."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cost, o.loss)):
        if found and option.loss >= found[-1].loss:
            continue
        while len(found) > 1 and _slope(found[-1], option) >= _slope(found[-2], found[-1]):
            found.pop()
        found.append(option)
    return found


def _slope(a: Option, b: Option) -> float:
    """Loss saved per cost, from a cheaper option to a dearer one."""
    return (a.loss - b.loss) / (b.cost - a.cost)


def front(options_S: Sequence[Sequence[Option]]) -> list[Allocation]:
    """Optimal assignments from the cheapest one to the one that loses least, each a step from the one before."""
    hulls = [hull(options) for options in options_S]
    steps = [
        (_slope(a, b), layer, place)
        for layer, options in enumerate(hulls)
        for place, (a, b) in enumerate(pairwise(options))
    ]
    # Within a layer slopes fall, so its steps come in their order.
    steps.sort(key=lambda step: (-step[0], step[1], step[2]))
    chosen = [options[0] for options in hulls]
    found = [_optimum(chosen)]
    for _, layer, place in steps:
        chosen[layer] = hulls[layer][place + 1]
        found.append(_optimum(chosen))
    return found


def _optimum(chosen: Sequence[Option]) -> Allocation:
    return Allocation(tuple(chosen), sum(option.cost for option in chosen))


def allocate(options_S: Sequence[Sequence[Option]], budget: float) -> Allocation | None:
    """The cheapest assignment whose predicted loss is at most `budget` nats; None where there is none.

    The walk along the front ends at the first assignment within the budget. Of its steps those are taken back that
    the budget, now that it is met, can do without.
    """
    walked = front(options_S)
    last = next((place for place, each in enumerate(walked) if each.loss <= budget), None)
    if last is None:
        return None
    if last == 0:
        return walked[0]
    before, within = walked[last - 1], walked[last]
    share = (before.loss - budget) / (before.loss - within.loss)
    bound = before.cost + share * (within.cost - before.cost)
    chosen = list(within.chosen)
    room = budget - within.loss
    cheaper = sorted(
        ((chosen[i].cost - o.cost, -o.loss, i, o) for i, options in enumerate(options_S) for o in options),
        key=lambda entry: entry[:3],
        reverse=True,
    )
    for _, _, layer, option in cheaper:
        more = option.loss - chosen[layer].loss
        if option.cost < chosen[layer].cost and more <= room:
            chosen[layer], room = option, room - more
    return Allocation(tuple(chosen), bound)
