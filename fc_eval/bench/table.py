"""Measured rows to a CSV file that keeps what other machines have put there, and to a text table."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fc_eval.errors import FcEvalError
from fc_eval.results.measured_csv import read_measured

Row = Mapping[str, str]


def merge_csv(path: Path, columns: Sequence[str], key: Sequence[str], rows: Sequence[Row]) -> None:
    """Writes rows into a CSV file: those with the same `key` are replaced, all others stay where they are.

    Raises:
        FcEvalError: the file has other columns, or is none that was written here.
    """
    kept: dict[tuple[str, ...], Row] = {}
    if path.exists():

        def check(names: list[str]) -> None:
            if names != list(columns):
                raise FcEvalError(f"{path} has the columns {names}: expected {list(columns)}; give another out=")

        kept = {tuple(row[name] for name in key): row for _, row in read_measured(path, check)}
    kept |= {tuple(row[name] for name in key): row for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
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
