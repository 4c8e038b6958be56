"""Which runs of a report are those of an experiment, and how many of its arms are there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fc_eval.collective.comm import parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.experiment import Experiment
from fc_eval.report.groups import Group, arranged
from fc_eval.results.compare import Paired
from fc_eval.results.record import RunRecord


@dataclass(frozen=True)
class Members:
    """The runs of an experiment, in groups; `own` where they have all its evaluations, at a W that it plans."""

    groups: tuple[Group, ...]
    own: bool


def members(found: Experiment, groups: Sequence[Group]) -> Members:
    """The groups of an experiment's own setting; only where there is none, those of its comms in any other.

    Runs that made further evaluations beside the experiment's stand with those that did not, where their baselines
    agree in every window and question.
    """
    chosen = [(group, mine) for group in groups if (mine := _members(found, group)) is not None]
    own = [(group, mine) for group, mine in chosen if _as_planned(found, mine)]
    # The run that did least beside the experiment comes first, so that one W's settings are another's.
    own.sort(key=lambda each: len(each[0].evals))
    merged = _merged([mine for _, mine in own])
    return Members(tuple(arranged(merged or [mine for _, mine in chosen])), bool(own))


def comm_name(record: RunRecord) -> str:
    """The comm in its one spelling; empty for one that is not known here."""
    try:
        return parse_comm(record.arm.comm_full).name
    except FcEvalError:
        return ""


def coverage(found: Experiment, chosen: Members) -> str:
    """'17 of 17': how many of the planned arms (comms, policies, sizes) were run, by model where there are several.

    A comm that was run in another setting than the experiment's own is none of its arms.
    """
    planned = len(found.comms) * len(found.policies) * len(found.sizes or _sizes(chosen.groups))
    run: dict[str, set[tuple[str, str, int]]] = {}
    for group in chosen.groups:
        arms = run.setdefault(group.heading(tp=False, detail=False), set())
        for pair in group.pairs if chosen.own else ():
            if not pair.record.is_baseline:
                arms.add((comm_name(pair.record), pair.record.arm.policy, pair.record.arm.tp))
    texts = []
    for title, arms in run.items():
        rest = "" if len(arms) == planned else ": the rest is missing" if arms else ": none in its own setting"
        texts.append(f"{len(arms)} of {planned}{rest}" + (f" ({title})" if len(run) > 1 else ""))
    return "; ".join(texts)


def _sizes(groups: Iterable[Group]) -> set[int]:
    return {group.first.arm.tp for group in groups}


def _as_planned(found: Experiment, group: Group) -> bool:
    return set(found.evals) <= set(group.evals) and group.first.arm.tp in (found.sizes or (group.first.arm.tp,))


def _members(found: Experiment, group: Group) -> Group | None:
    """The baseline and the runs of a group that belong to an experiment, with its evaluations where they were run."""
    known = [name for name in group.evals if name in found.evals] or list(group.evals)
    kept = [
        _restricted(pair, known)
        for pair in group.pairs
        if (
            pair.record.is_baseline
            or (comm_name(pair.record) in found.comms and pair.record.arm.policy in found.policies)
        )
        and found.weights in (None, pair.record.arm.stored)
    ]
    kept = [pair for pair in kept if pair.record.evals]
    if not any(not pair.record.is_baseline for pair in kept):
        return None
    return group.of(kept)


def _restricted(pair: Paired, names: Sequence[str]) -> Paired:
    record = replace(pair.record, evals={name: info for name, info in pair.record.evals.items() if name in names})
    return replace(pair, record=record, deltas=tuple(d for d in pair.deltas if d.eval in names))


def _merged(groups: Sequence[Group]) -> list[Group]:
    """Groups of one heading whose baselines measured the same as one; what several ran alike is there once."""
    merged: list[Group] = []
    for group in groups:
        place = next((i for i, other in enumerate(merged) if _one_baseline(group, other)), None)
        if place is None:
            merged.append(group)
            continue
        pairs = merged[place].pairs
        further = [pair for pair in group.pairs if not any(_alike(pair.record, known.record) for known in pairs)]
        merged[place] = merged[place].of([*pairs, *further])
    return merged


def _one_baseline(a: Group, b: Group) -> bool:
    ours, theirs = a.first, b.first
    return (
        a.heading(detail=False) == b.heading(detail=False)
        and ours.is_baseline
        and theirs.is_baseline
        and _alike(ours, theirs)
    )


def _alike(a: RunRecord, b: RunRecord) -> bool:
    """Whether two runs are one arm with the same measurements, to the last bit, in every evaluation.

    Settings may differ that change no number here, such as how many windows a forward pass has.
    """
    same = a.arm == b.arm and a.evals == b.evals
    return same and all(a.results[name] == b.results[name] and _same(a, b, name) for name in a.evals)


def _same(a: RunRecord, b: RunRecord, name: str) -> bool:
    if name in a.windows:
        x, y = a.windows[name], b.windows[name]
        return all(np.array_equal(getattr(x, key), getattr(y, key)) for key in ("nll_sum", "tokens", "cluster"))
    if name in a.samples:
        ours, theirs = a.samples[name], b.samples[name]
        same = ours.metrics.keys() == theirs.metrics.keys() and ours.doc_hash == theirs.doc_hash
        return same and all(np.array_equal(ours.metrics[key], theirs.metrics[key]) for key in ours.metrics)
    return name in a.layers and a.fingerprint == b.fingerprint
