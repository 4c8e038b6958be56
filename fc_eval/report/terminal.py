"""The table that stands on the screen at the end of a run."""

from collections.abc import Iterable

from fc_eval.report.groups import group_pairs
from fc_eval.report.tables import accuracy_note, summary_table
from fc_eval.results.compare import pair_runs, published_flags
from fc_eval.results.record import RunRecord
from fc_eval.results.text import align_points, text_table


def terminal_table(records: Iterable[RunRecord]) -> str:
    """One compact table per baseline: comm, bits, wire ratio, perplexity and accuracy with their paired errors."""
    records = list(records)
    parts = []
    for group in group_pairs(pair_runs(records)):
        table = summary_table(group, divergence=False)
        columns = [align_points(column) for column in zip(*table.texts(), strict=True)]
        rows = [list(row) for row in zip(*columns, strict=True)]
        parts += [
            f"{group.title}; {group.samples}",
            text_table([c.title for c in table.columns], rows, over=[c.over for c in table.columns]),
        ]
        said = [accuracy_note(group), *published_flags(group.first), *(pair.problem for pair in group.pairs)]
        parts += [*dict.fromkeys(filter(None, said)), ""]
    for model in dict.fromkeys(record.arm.model for record in records):  # once, under all tables that name it
        notes = dict.fromkeys(note for record in records if record.arm.model == model for note in record.notes)
        parts += [f"{model}: {'; '.join(notes)}"] if notes else []
    return "\n".join(parts).rstrip()
