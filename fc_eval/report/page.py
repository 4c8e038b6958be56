"""What a report says, apart from how it is written down: a `Page`, made from records."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fc_eval.experiment import Experiment
from fc_eval.report.details import detail_tables
from fc_eval.report.experiments import ExperimentSection, experiment_section
from fc_eval.report.figure import Plot
from fc_eval.report.groups import Group, group_pairs
from fc_eval.report.guide import guide
from fc_eval.report.layers import by_layer_tables, layer_tables
from fc_eval.report.plot_bits import bits_plots
from fc_eval.report.plot_context import context_plots
from fc_eval.report.plot_deltas import forest_plots
from fc_eval.report.plot_grid import grid_plots
from fc_eval.report.plot_layers import layer_plots
from fc_eval.report.plot_tp import tp_plots
from fc_eval.report.provenance import environments_table, protocols_table, runs_table
from fc_eval.report.tables import Table, accuracy_note, summary_table, words
from fc_eval.results.compare import Paired, published_flags
from fc_eval.results.record import RunRecord
from fc_eval.results.state import Problem

TITLE = "Quantized tensor-parallel all-reduce: accuracy and bits"


# What a section shows, in this order.
_PLOTS = (bits_plots, grid_plots, context_plots, layer_plots, forest_plots)


@dataclass(frozen=True)
class Section:
    """One group of runs: heading, what was measured, remarks, tables and plots; `layers` are layer errors by run."""

    title: str
    anchor: str
    samples: str
    notes: tuple[str, ...]
    summary: Table
    layers: tuple[tuple[str, Table], ...]
    details: tuple[tuple[str, Table], ...]
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Page:
    """A whole report: `models` with what all of their runs say; `problems` is None where every run gave numbers.

    `experiments` are sections on a part of the runs each, in front of the sections on all of them.
    """

    title: str
    lede: str
    models: tuple[tuple[str, tuple[str, ...]], ...]
    warnings: tuple[str, ...]
    experiments: tuple[ExperimentSection, ...]
    sections: tuple[Section, ...]
    across: tuple[Plot, ...]
    problems: Table | None
    environments: Table
    protocols: Table
    runs: Table
    guide: tuple[tuple[str, str], ...]

    @property
    def plots(self) -> tuple[Plot, ...]:
        """All plots of the page."""
        own = [plot for each in self.experiments for plot in each.plots]
        return (*own, *(plot for section in self.sections for plot in section.plots), *self.across)


def make_page(
    pairs: Sequence[Paired],
    problems: Sequence[Problem],
    experiments: Sequence[Experiment] = (),
    only_experiments: bool = False,
) -> Page:
    """Arranges runs and problems; experiments of which nothing was run are left out, on demand all but experiments.

    Of several experiments those stay that have runs of their own setting: nearly every run has a comm of another's.
    """
    groups = group_pairs(pairs)
    records = [pair.record for group in groups for pair in group.pairs]
    models = _models(records)
    rows = [[problem.name, problem.state, problem.reason] for problem in problems]
    return Page(
        title=TITLE,
        lede=_lede(records, problems),
        models=tuple(models.items()),
        warnings=tuple(dict.fromkeys(text for group in groups for text in _warnings(group))),
        experiments=tuple(
            filter(None, (experiment_section(each, groups, len(experiments) > 1) for each in experiments))
        ),
        sections=() if only_experiments else tuple(_section(group, models) for group in groups),
        across=() if only_experiments else tuple(tp_plots(groups)),
        problems=words(["run", "state", "why"], rows) if rows else None,
        environments=environments_table(records),
        protocols=protocols_table(records),
        runs=runs_table(records),
        guide=guide(groups),
    )


def _models(records: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    """For each model, the notes that all of its runs carry: they are said once, not in every section."""
    found: dict[str, list[str]] = {}
    for record in records:
        kept = found.setdefault(record.arm.model, list(record.notes))
        found[record.arm.model] = [note for note in kept if note in record.notes]
    return {model: tuple(dict.fromkeys(notes)) for model, notes in found.items() if notes}


def _section(group: Group, models: Mapping[str, tuple[str, ...]]) -> Section:
    said = models.get(group.first.arm.model, ())
    notes = [accuracy_note(group)]
    notes += [note for pair in group.pairs for note in pair.record.notes if note not in said]
    return Section(
        title=group.title,
        anchor=group.slug,
        samples=group.samples,
        notes=tuple(dict.fromkeys(filter(None, notes))),
        summary=summary_table(group),
        layers=tuple(layer_tables(group)),
        details=(*detail_tables(group), *by_layer_tables(group)),
        plots=tuple(plot for plots in _PLOTS for plot in plots(group)),
    )


def _lede(records: Sequence[RunRecord], problems: Sequence[Problem]) -> str:
    models = list(dict.fromkeys(record.arm.model for record in records))
    runs = "1 finished run" if len(records) == 1 else f"{len(records)} finished runs"
    text = f"{runs} of {', '.join(models)}."
    if problems:
        states = [problem.state for problem in problems]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
        text += f" Without numbers: {counts}; the reasons stand below."
    return text


def _warnings(group: Group) -> list[str]:
    """What a reader must know before believing a table."""
    found = published_flags(group.first)
    for label, pair in zip(group.labels, group.pairs, strict=True):
        who = f"{group.title}, {label}"
        if pair.problem:
            found.append(f"{who}: no delta, because {pair.problem}.")
        stages = [f"{count:,} in {stage}" for stage, count in pair.record.nonfinite_groups.items() if count]
        if stages:
            found.append(f"{who}: non-finite groups on the wire ({', '.join(stages)}); its numbers may mean nothing.")
        lost = [f"{d.label} {d.metric}" for d in pair.deltas if not math.isfinite(d.value)]
        if lost:
            found.append(f"{who}: not finite: {', '.join(lost)}.")
    return found
