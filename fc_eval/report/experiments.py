"""The section of one experiment: its runs among those of a report, with the tables and plots that its file asks for.

`members` says which runs are an experiment's, whatever they were computed for.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fc_eval.collective.comm import parse_comm
from fc_eval.cost import costs
from fc_eval.experiment import Experiment, Published
from fc_eval.report.figure import Plot
from fc_eval.report.groups import Group, find
from fc_eval.report.layers import layer_tables
from fc_eval.report.members import Members, comm_name, coverage, members
from fc_eval.report.pareto import budget_table, equal_table, front_table
from fc_eval.report.plot_accuracy import accuracy_plots
from fc_eval.report.plot_bits import bits_plots
from fc_eval.report.plot_context import context_plots
from fc_eval.report.plot_deltas import forest_plots
from fc_eval.report.plot_grid import grid_plots
from fc_eval.report.plot_group_size import group_size_plots
from fc_eval.report.plot_layers import layer_plots
from fc_eval.report.plot_pareto import pareto_plots
from fc_eval.report.plot_tp import tp_plots
from fc_eval.report.tables import Cell, Column, Table, accuracy_note, summary_table, words
from fc_eval.results.table import FIVE_TASK_EVAL
from fc_eval.results.text import value_text

# Of each group of runs, by the name that a file's `shows` has for it; `tp`, `budget` and `cost` are made elsewhere.
_PLOTS: dict[str, Callable[[Group], list[Plot]]] = {
    "group_size": group_size_plots,
    "bits": bits_plots,
    "accuracy_bits": accuracy_plots,
    "grid": grid_plots,
    "pareto": pareto_plots,
    "forest": forest_plots,
    "context": context_plots,
    "layers": layer_plots,
}
# Of each group and text: what a file's `shows` calls it, its title, and who makes it.
_TABLES: tuple[tuple[str, str, Callable[[Group, str], Table | None]], ...] = (
    ("equal", "other systems beside ours", equal_table),
    ("pareto", "worth their cost", front_table),
)
# The message of the cost table: a prefill of so many tokens.
COST_TOKENS = 2048
# Of the comms that were not run, so many are named.
MISSING_SHOWN = 12


@dataclass(frozen=True)
class Part:
    """The runs of an experiment that share a baseline."""

    title: str
    samples: str
    notes: tuple[str, ...]
    summary: Table
    tables: tuple[tuple[str, Table], ...]
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class ExperimentSection:
    """What a report says of one experiment: facts as terms and texts, its runs, and tables on all of them."""

    name: str
    title: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]
    tables: tuple[tuple[str, Table], ...]
    across: tuple[Plot, ...]

    @property
    def plots(self) -> tuple[Plot, ...]:
        """All plots of the section."""
        return (*(plot for part in self.parts for plot in part.plots), *self.across)


def experiment_section(found: Experiment, groups: Sequence[Group], only_own: bool = False) -> ExperimentSection | None:
    """The section of one experiment; None where none of its comms was run, or none in the experiment's own setting."""
    chosen = members(found, groups)
    if not chosen.groups or (only_own and not chosen.own):
        return None
    tables = [("Published numbers", _published(found, chosen.groups))] if found.published else []
    tables += [("Cost of one all-reduce", _cost_table(found, chosen.groups))] if "cost" in found.shows else []
    return ExperimentSection(
        name=found.name,
        title=found.title,
        facts=tuple(_facts(found, chosen)),
        parts=tuple(_part(found, group) for group in chosen.groups),
        tables=tuple(tables),
        across=tuple(_renamed(found, tp_plots(chosen.groups))) if "tp" in found.shows else (),
    )


def _part(found: Experiment, group: Group) -> Part:
    tables = [
        (f"{group.evals[name].label}: {title}", table)
        for show, title, make in _TABLES
        for name in group.perplexities()
        if show in found.shows and (table := make(group, name)) is not None
    ]
    if "layers" in found.shows:
        tables += layer_tables(group)
    if "budget" in found.shows and (table := budget_table(group)) is not None:
        tables.append(("Cheapest within a loss budget", table))
    plots = [plot for show in found.shows if show in _PLOTS for plot in _PLOTS[show](group)]
    return Part(
        title=group.title,
        samples=group.samples,
        notes=tuple(filter(None, [accuracy_note(group)])),
        summary=summary_table(group),
        tables=tuple(tables),
        plots=tuple(_renamed(found, plots)),
    )


def _renamed(found: Experiment, plots: Sequence[Plot]) -> list[Plot]:
    """The same plots with names of their own: those of all runs stand in the same report."""
    return [replace(plot, name=f"{found.name}_{plot.name}") for plot in plots]


def _facts(found: Experiment, chosen: Members) -> list[tuple[str, str]]:
    run = {comm_name(pair.record) for group in chosen.groups for pair in group.pairs}
    missing = [parse_comm(name).label for name in found.comms if name not in run]
    models = list(dict.fromkeys(group.first.arm.model for group in chosen.groups))
    facts = [
        ("Source", found.source),
        ("Question", found.asks),
        ("Fixed by the paper", found.fixed),
        ("Chosen here", "; ".join(f"{key}: {text.rstrip('.')}" for key, text in found.ours.items()) + "."),
        ("Found by the paper", found.finding),
        ("Command", shlex.join(["fc-eval", "run", "-m", f"experiment={found.name}", f"model={','.join(models)}"])),
    ]
    facts.append(("Run", f"{coverage(found, chosen)}."))
    if not chosen.own:
        facts.append(("Measured otherwise", f"{_otherwise(found, chosen.groups)}."))
    if missing:
        named = [*missing[:MISSING_SHOWN], *[f"{len(missing) - MISSING_SHOWN} more"][: len(missing) > MISSING_SHOWN]]
        facts.append(("Not run", f"{len(missing)} of {len(found.comms)} comms: {', '.join(named)}."))
    return facts


def _otherwise(found: Experiment, groups: Sequence[Group]) -> str:
    """Where no runs have the experiment's evaluations at its W: what they have instead."""
    texts = []
    other = list(dict.fromkeys(name for group in groups for name in group.evals if name not in found.evals))
    lacking = [name for name in found.evals if not all(name in group.evals for group in groups)]
    if other or lacking:
        said = [f"with {', '.join(other)}"] if other else [f"without {', '.join(lacking)} in each run"]
        texts.append(f"{said[0]}; the experiment's own: {', '.join(found.evals)}")
    sizes = sorted({group.first.arm.tp for group in groups})
    if found.sizes and not set(sizes) <= set(found.sizes):
        ours, own = (", ".join(map(str, each)) for each in (sizes, found.sizes))
        texts.append(f"with tp={ours}; the experiment's own: tp={own}")
    return "; ".join(texts)


def _published(found: Experiment, groups: Sequence[Group]) -> Table:
    """Published numbers; ours where the model is the same, otherwise they are targets for who has the model."""
    rows = []
    for row in found.published:
        texts = [row.model, row.weights, parse_comm(row.comm).label, row.eval, f"{row.value:g}"]
        rows.append([*texts, _ours(row, groups), row.source or found.source])
    return words(["model", "weights", "comm", "evaluation", "published", "ours", "source"], rows)


def _ours(row: Published, groups: Sequence[Group]) -> str:
    texts = []
    for group in groups:
        for pair in group.pairs if group.first.arm.model == row.model else ():
            d = group.accuracy(pair) if row.eval == FIVE_TASK_EVAL else find(pair, row.eval, "perplexity")
            if d is None or d.eval != row.eval or comm_name(pair.record) != parse_comm(row.comm).name:
                continue
            said = [f"tp={pair.record.arm.tp}"] + ["partial"] * d.partial
            said += [f"{pair.record.arm.weights} weights"] * (pair.record.arm.weights != row.weights)
            texts.append(f"{value_text(d.value, d.metric)} ({', '.join(said)})")
    return "; ".join(texts) or "not run"


def _cost_table(found: Experiment, groups: Sequence[Group]) -> Table:
    """Steps, rounds and bytes of the experiment's comms for a prefill of the first model."""
    record = groups[0].first
    shape = ((record.config.get("config") or {}).get("model") or {}).get("shape") or {}
    hidden = shape.get("hidden") or 4096
    sizes = sorted({group.first.arm.tp for group in groups})
    columns = [
        Column("comm", f"{COST_TOKENS} x {hidden} values, {record.arm.dtype}", words=True),
        *map(Column, ("W", "steps", "quantization rounds", "MB per rank", "wire ratio")),
    ]
    rows = tuple(
        (
            Cell(cost.label),
            Cell(str(cost.world_size), cost.world_size),
            Cell(str(cost.steps), cost.steps),
            Cell(str(cost.qdq_rounds), cost.qdq_rounds),
            Cell(f"{cost.wire_bytes / 1e6:.3f}", cost.wire_bytes),
            Cell(f"{cost.wire_ratio:.2f}x", cost.wire_ratio),
        )
        for cost in costs(found.comms, sizes, COST_TOKENS, hidden, record.arm.dtype)
    )
    return Table(tuple(columns), rows)
