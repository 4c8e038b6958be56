"""Every number of a group: one table per evaluation and metric, its columns those that the metric has."""

import math
from collections.abc import Callable

from fc_eval.report.groups import Group
from fc_eval.report.tables import ERROR, Cell, Column, Table, wire_cells
from fc_eval.results.compare import Paired
from fc_eval.results.delta import Delta
from fc_eval.results.table import five_task_averages
from fc_eval.results.text import (
    PLUS_MINUS,
    delta_text,
    flips_text,
    interval_text,
    number,
    p_text,
    sampling_error,
    value_text,
    value_with_error,
)

Entry = Callable[[Delta], Cell]

# Title, cell of a run, and whether it says anything about the baseline alone.
_COLUMNS: tuple[tuple[str, Entry, bool], ...] = (
    ("value", lambda d: Cell(value_text(d.value, d.metric), d.value), True),
    (f"{PLUS_MINUS} unpaired", lambda d: Cell(sampling_error(d), d.value_stderr), True),
    (ERROR, lambda d: Cell("" if math.isnan(d.delta) else delta_text(d), d.delta), False),
    ("95 % interval", lambda d: Cell(interval_text(d), d.low), False),
    (f"ln ratio {PLUS_MINUS} error", lambda d: Cell(_ln_text(d), d.ln_ratio), False),
    ("p", lambda d: Cell(p_text(d), d.p_value), False),
    ("lost/gained", lambda d: Cell(flips_text(d), math.nan if d.lost is None else d.lost), False),
    ("recovery, %", lambda d: Cell("" if math.isnan(d.recovery) else f"{100 * d.recovery:.2f}", d.recovery), False),
)


_DIVERGENCE = (
    ("kl_mean", "mean KL, nats"),
    ("kl_p95", "KL, 95th percentile"),
    ("kl_max", "KL, largest"),
    ("same_top1", "same top-1, %"),
)


def detail_tables(group: Group) -> list[tuple[str, Table]]:
    """Titles ('wikitext2: perplexity, 16 windows') and tables, with the group's comms as rows."""
    found: dict[tuple[str, str], list[tuple[Paired, str, Delta]]] = {}
    for pair, label in zip(group.pairs, group.labels, strict=True):
        for d in [*pair.deltas, *five_task_averages(pair.deltas)]:
            kind = "divergence from the baseline" if d.metric in dict(_DIVERGENCE) else d.metric
            found.setdefault((d.eval, kind), []).append((pair, label, d))
    order = {name: place for place, name in enumerate(group.evals)}
    tables = []
    for name, kind in sorted(found, key=lambda key: order.get(key[0], len(order))):
        entries = found[name, kind]
        divergence = entries[0][2].metric in dict(_DIVERGENCE)
        title = _title(group, entries[0][2], kind)
        tables.append((title, _divergence_table(entries) if divergence else _table(entries)))
    return tables


def _divergence_table(entries: list[tuple[Paired, str, Delta]]) -> Table:
    """KL and top-1 agreement side by side: each is a difference from the baseline already."""
    columns = (Column("comm", words=True), Column("bits"), *(Column(title) for _, title in _DIVERGENCE))
    rows = []
    for label in dict.fromkeys(label for _, label, _ in entries):
        pair = next(pair for pair, other, _ in entries if other == label)
        own = {d.metric: Cell(_value_text(d), d.value) for _, other, d in entries if other == label}
        cells = [own.get(metric, Cell("")) for metric, _ in _DIVERGENCE]
        rows.append((*wire_cells(pair, label)[:2], *cells))
    return Table(columns, tuple(rows))


def _value_text(d: Delta) -> str:
    return value_with_error(d) if d.value_stderr == d.value_stderr else value_text(d.value, d.metric)


def _title(group: Group, d: Delta, kind: str) -> str:
    unit = "windows" if d.eval in group.perplexities() else "questions"
    return f"{d.label}: {kind}, {d.samples:,} {unit}" + (" (partial)" if d.partial else "")


def _table(entries: list[tuple[Paired, str, Delta]]) -> Table:
    kept = [c for c in _COLUMNS if any(c[1](d).text for pair, _, d in entries if c[2] or not pair.record.is_baseline)]
    rows = []
    for pair, label, d in entries:
        cells = [cell(d) if alone or not pair.record.is_baseline else Cell("", 0.0) for _, cell, alone in kept]
        rows.append((*wire_cells(pair, label)[:2], *cells))
    columns = (Column("comm", words=True), Column("bits"), *(Column(title) for title, _, _ in kept))
    return Table(columns, tuple(rows), pinned=1 if entries[0][0].record.is_baseline else 0)


def _ln_text(d: Delta) -> str:
    if math.isnan(d.ln_ratio):
        return ""
    places = 4 if not d.ln_ratio_stderr > 0 else min(8, max(0, 1 - math.floor(math.log10(d.ln_ratio_stderr))))
    return f"{number(d.ln_ratio, places, sign=True)} {PLUS_MINUS} {number(d.ln_ratio_stderr, places)}"
