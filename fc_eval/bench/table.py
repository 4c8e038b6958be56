"""Measured rows to a CSV file that keeps what other machines have put there, and to a text table."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fc_eval.errors import FcEvalError, os_error
from fc_eval.results.measured_csv import read_measured

Row = Mapping[str, str]


def rows_to_keep(path: Path, columns: Sequence[str], added: Sequence[str] = ()) -> list[Row]:
    """The rows of a CSV file that others are to be written into; none where there is no file yet.

    A bench calls this before it measures, so that a file or folder that does not fit costs no measurement.

    Args:
        path: the file, whose folder is made.
        columns: its columns, in their order.
        added: those of them that files of earlier versions lack, and that are empty in their rows.

    Raises:
        FcEvalError: the file has other columns or is none that was written here, or the folder cannot be made.
    """

    def check(names: list[str]) -> None:
        if names not in (list(columns), [name for name in columns if name not in added]):
            raise FcEvalError(f"{path} has the columns {names}: expected {list(columns)}; give another out=")

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(error, path.parent) from None
    if not path.exists():
        return []
    return [dict.fromkeys(added, "") | row for _, row in read_measured(path, check)]


def merge_csv(
    path: Path, columns: Sequence[str], key: Sequence[str], rows: Sequence[Row], added: Sequence[str] = ()
) -> None:
    """Writes rows into a CSV file: those with the same `key` are replaced, all others stay where they are.

    Raises:
        FcEvalError: as `rows_to_keep`.
    """
    both = [*rows_to_keep(path, columns, added), *rows]
    kept = {tuple(row[name] for name in key): row for row in both}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())
    os.replace(temporary, path)


def text_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Aligned text, one line per row."""
    lines = [dict(zip(columns, columns, strict=True)), *rows]
    widths = {name: max(len(line[name]) for line in lines) for name in columns}
    return "\n".join("  ".join(line[name].rjust(widths[name]) for name in columns).rstrip() for line in lines)
