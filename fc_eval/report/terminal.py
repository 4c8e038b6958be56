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
    # What is to be known about a model stands once, under all tables that name it.
    parts += dict.fromkeys(f"{record.arm.model}: {'; '.join(record.notes)}" for record in records if record.notes)
    return "\n".join(parts).rstrip()
