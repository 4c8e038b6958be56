"""What comms cost in accuracy, from run records: the runs of a model at one W whose comm is the one predicted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError, unknown
from fc_eval.report.groups import Group, find, group_pairs
from fc_eval.results.compare import Paired, pair_runs
from fc_eval.results.delta import Delta
from fc_eval.results.record import load_runs

# What records call the weights that a prediction calls so.
RECORDED = {"bf16": "native", "w8a8": "w8a8"}


@dataclass(frozen=True)
class Loss:
    """Of one comm: the delta of a perplexity and of an accuracy; None where that was not measured."""

    perplexity: Delta | None
    accuracy: Delta | None

    @property
    def size(self) -> float:
        """What a front is drawn over: ln(PPL ratio), else points of accuracy lost; NaN where neither is known."""
        if self.perplexity is not None and math.isfinite(self.perplexity.ln_ratio):
            return self.perplexity.ln_ratio
        if self.perplexity is None and self.accuracy is not None:
            return -self.accuracy.delta
        return math.nan


@dataclass(frozen=True)
class Losses:
    """What the runs say: their title and samples, the perplexity's label, and a loss by comm."""

    title: str
    perplexity: str
    accuracy: str
    by_comm: Mapping[Comm, Loss]


def read_losses(
    folders: Sequence[Path], model: str, weights: str, world_size: int, comms: Sequence[Comm], eval_name: str | None
) -> Losses | None:
    """Losses of the comms, as far as runs with the same model, weights and W have them.

    Of several groups of runs, each with a baseline of its own, the one with the most of the comms counts: deltas of
    different baselines are not put into one table.

    Args:
        folders: as for a report.
        model: name of its preset.
        weights: 'bf16' or 'w8a8'.
        world_size: W.
        comms: those that are wanted.
        eval_name: the perplexity that counts; None for the first one.

    Returns:
        None where there is no such run.

    Raises:
        FcEvalError: a folder that is missing, or an evaluation that these runs do not have.
    """
    records, _ = load_runs(folders)
    of_model = [r for r in records if (r.arm.model, r.arm.tp, r.arm.stored) == (model, world_size, RECORDED[weights])]
    found = [(group, _pairs(group)) for group in group_pairs(pair_runs(of_model))]
    if not found:
        return None
    group, pairs = max(found, key=lambda item: sum(comm in item[1] for comm in comms))
    names = group.perplexities()
    if eval_name is not None and eval_name not in names:
        raise unknown("perplexity", eval_name, names, hint=f"of the runs {group.title}")
    name = eval_name or (names[0] if names else None)
    by_comm = {
        comm: Loss(find(pair, name, "perplexity") if name else None, group.accuracy(pair))
        for comm, pair in pairs.items()
        if comm in comms or not comm.is_quantized
    }
    accuracies = [loss.accuracy for loss in by_comm.values() if loss.accuracy is not None]
    label = group.evals[name].label if name else ""
    return Losses(
        title=f"{group.title}; {group.samples}",
        perplexity=label,
        accuracy=accuracies[0].label if accuracies else "",
        by_comm=by_comm,
    )


def _pairs(group: Group) -> dict[Comm, Paired]:
    """The runs of a group by their comm, those with a layer policy of their own left out."""
    found: dict[Comm, Paired] = {}
    for pair in group.pairs:
        if pair.record.arm.policy != "uniform" or pair.problem:
            continue
        try:
            found.setdefault(parse_comm(pair.record.arm.comm_full), pair)
        except FcEvalError:
            continue  # of a version with other comms; it is no comm that could be asked for here
    return found
