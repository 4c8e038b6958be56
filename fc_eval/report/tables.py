"""What a table shows, apart from how it is written down: `Table`, filled from a `Group`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fc_eval.report.groups import FIRST_KNOWN, Group, find
from fc_eval.results.compare import Paired
from fc_eval.results.delta import Delta
from fc_eval.results.table import PREFERRED
from fc_eval.results.text import MISSING, PLUS_MINUS, delta_text, number, sampling_error, value_text, value_with_error

ERROR = f"Δ {PLUS_MINUS} error"


AVERAGES = {
    PREFERRED: "acc_norm where a task defines it, acc for WinoGrande",
    FIRST_KNOWN: "acc_norm where a task defines it, otherwise acc",
}


@dataclass(frozen=True)
class Column:
    """A column: its title, the heading that it shares with its neighbours, whether it holds words, or commands."""

    title: str
    over: str = ""
    words: bool = False
    code: bool = False

    @property
    def flat(self) -> str:
        """The title alone, for tables with one header row."""
        return f"{self.over} {self.title}".strip()


@dataclass(frozen=True)
class Cell:
    """Text, and the number by which the column is sorted (NaN: last)."""

    text: str
    sort: float = math.nan


@dataclass(frozen=True)
class Table:
    """Columns and rows; the first `pinned` rows stay on top when a reader sorts."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    pinned: int = 0

    def texts(self) -> list[list[str]]:
        """The rows as text."""
        return [[cell.text for cell in row] for row in self.rows]


def words(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of words."""
    return Table(tuple(Column(c, words=True) for c in columns), tuple(tuple(Cell(t) for t in row) for row in rows))


def summary_table(group: Group, divergence: bool = True) -> Table:
    """The comms of a group as rows: bits, wire ratio, then each perplexity and the accuracy, with paired errors.

    Args:
        group: runs of one baseline.
        divergence: also KL and same-top-1 where they were measured.
    """
    columns = [Column("comm", words=True), Column("bits"), Column("wire ratio")]
    rows: list[list[Cell]] = [[*wire_cells(pair, label)] for pair, label in zip(group.pairs, group.labels, strict=True)]
    for name, metric in (dict.fromkeys(group.perplexities(), "perplexity") | group.other_tasks()).items():
        over = _over(group, name)
        columns += [Column(metric, over), Column(ERROR, over)]
        for pair, row in zip(group.pairs, rows, strict=True):
            row += _value_and_delta(pair, find(pair, name, metric))
    accuracies = [group.accuracy(pair) for pair in group.pairs]
    known = next((d for d in accuracies if d is not None), None)
    if known is not None:
        over = known.label + (" (partial)" if known.partial else "")
        columns += [
            Column(f"{known.metric}, %" if known.metric not in AVERAGES else "acc, %", over),
            Column(ERROR, over),
        ]
        for pair, row, accuracy in zip(group.pairs, rows, accuracies, strict=True):
            row += _value_and_delta(pair, accuracy)
    for name in group.perplexities() if divergence else []:
        for metric, title in (("kl_mean", "KL, nats"), ("same_top1", "same top-1, %")):
            found = [find(pair, name, metric) for pair in group.pairs]
            if any(found):
                columns.append(Column(title, f"{group.evals[name].label} vs baseline"))
                for row, d in zip(rows, found, strict=True):
                    row.append(Cell(value_with_error(d), d.value) if d else Cell(""))
    pinned = 1 if group.first.is_baseline else 0
    return Table(tuple(columns), tuple(tuple(row) for row in rows), pinned)


def accuracy_note(group: Group) -> str:
    """Which accuracy the summary shows, in words; empty where there is no average."""
    known = next((d for d in map(group.accuracy, group.pairs) if d is not None), None)
    if known is None or known.metric not in AVERAGES:
        return ""
    return f"Accuracy is the {known.label}: {AVERAGES[known.metric]}."


def _over(group: Group, name: str) -> str:
    info = group.evals[name]
    return info.label + (" (partial)" if info.partial else "")


def wire_cells(pair: Paired, label: str) -> list[Cell]:
    """Label, effective bits and wire ratio of a run."""
    bits, ratio = (pair.record.wire_number(key) for key in ("effective_bits", "wire_ratio"))
    return [Cell(label), Cell(number(bits, 2), bits), Cell(MISSING if math.isnan(ratio) else f"{ratio:.2f}x", ratio)]


def _value_and_delta(pair: Paired, d: Delta | None) -> list[Cell]:
    if d is None:
        return [Cell(MISSING), Cell(MISSING)]
    value = Cell(value_text(d.value, d.metric), d.value)
    if pair.record.is_baseline:
        own = sampling_error(d)
        return [value, Cell(f"{own} unpaired" if own else "", 0.0)]
    return [value, Cell(delta_text(d) if not math.isnan(d.baseline) else "no baseline", d.delta)]
