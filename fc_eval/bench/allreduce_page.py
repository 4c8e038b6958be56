"""The page of measured all-reduces: times beside NCCL, from which size on each comm is ahead, what of the link it uses.

Drawn from the CSV file of `fc-eval bench allreduce` alone; no GPU is needed.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from fc_eval.bench.allreduce_plots import noise_plots, place_plots
from fc_eval.bench.allreduce_rows import (
    NCCL,
    AllReduceRow,
    Line,
    Place,
    ahead_from,
    best_ratios,
    read_places,
    record_name,
    size_text,
)
from fc_eval.errors import os_error
from fc_eval.report.figure import Plot
from fc_eval.report.markdown import escape, image_markdown, markdown_table
from fc_eval.report.tables import Cell, Column, Table
from fc_eval.results.text import number

GUIDE = (
    "Time is that of one all-reduce, in microseconds: the median over replays of a CUDA graph, the maximum over ranks. "
    "In brackets: how many times as fast as NCCL in the same run.",
    "A comm is ahead from the smallest message on at which, and at all larger ones measured, it is faster in the same "
    "run; 'best unquantized' is the fastest of NCCL and the others that do not quantize. 'never': at no size; 'only "
    "at': it does not stay ahead up to the largest.",
    "The share of the link is what the busiest rank sends, over the time and the bandwidth of a plain copy in the same "
    "run.",
    "Signal over noise (SQNR) is that of normally distributed partial sums; what a comm costs a model is measured by "
    "`fc-eval run`.",
)


def write_page(path: Path) -> Path:
    """Writes the page beside the CSV file `path`, its plots in `plots/`; returns the page's path.

    Raises:
        FcEvalError: as `page_of`, or a folder that cannot be written.
    """
    text, plots = page_of(path)
    page, folder = path.with_suffix(".md"), path.parent / "plots"
    try:
        folder.mkdir(exist_ok=True)
        for plot in plots:
            plot.save(folder)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise os_error(error, page) from None
    return page


def page_of(path: Path) -> tuple[str, list[Plot]]:
    """The page as Markdown, and the plots that it shows.

    Raises:
        FcEvalError: as `read_places`.
    """
    places = read_places(path)
    parts = ["# All-reduce: quantized and not", f"Drawn by `fc-eval bench allreduce` from `{path.name}`."]
    parts.append("\n".join(f"- {escape(text)}" for text in GUIDE))
    shown: list[Plot] = []
    for place in places:
        plots = place_plots(path.stem, place)
        parts += [f"## {escape(place.title)}", "\n".join(f"- {escape(text)}" for text in _notes(path.stem, place))]
        for title, table in _tables(place).items():
            parts += [f"**{title}**", markdown_table(table)]
        parts += map(image_markdown, plots)
        shown += plots
    noise = noise_plots(path.stem, places)
    if noise:
        parts += ["## Noise beside bytes", *map(image_markdown, noise)]
    return "\n\n".join(parts) + "\n", shown + noise


def times_table(title: str, lines: Sequence[tuple[str, Line]], sizes: Sequence[int]) -> Table:
    """Microseconds, and how many times as fast as NCCL, by label and size; empty where a size was not measured."""
    rows = []
    for label, line in lines:
        found = [line.by_size.get(size) for size in sizes]
        cells = [Cell(_time_text(row), row.time_us) if row is not None else Cell("") for row in found]
        rows.append((Cell(label), *cells))
    return Table((Column(title, words=True), *(Column(size_text(size)) for size in sizes)), tuple(rows))


def _time_text(row: AllReduceRow) -> str:
    text = number(row.time_us, 1 if row.time_us < 99.95 else 0)
    beside_others = row.ratio_to_nccl is not None and row.implementation != NCCL
    return f"{text} ({row.ratio_to_nccl:.2f}x)" if beside_others else text


def _tables(place: Place) -> dict[str, Table]:
    lines = place.lines()
    tables = {"Time, µs": times_table("", [(line.label, line) for line in lines], place.sizes)}
    quantized = [line for line in lines if line.first.comm is not None]
    if quantized:
        tables["From which size on it is ahead"] = _ahead_table(quantized, lines)
    if any(row.link_fraction is not None for row in place.rows):
        tables["Share of the link, %"] = _link_table([line for line in lines if line.first.takes_the_link], place.sizes)
    return tables


def _ahead_table(quantized: Sequence[Line], lines: Sequence[Line]) -> Table:
    best = best_ratios(lines)
    columns = [Column("comm", words=True), Column("bytes, % of unquantized"), Column("SQNR, dB")]
    columns += [Column("NCCL", "ahead of"), Column("best unquantized", "ahead of")]
    rows = []
    for line in quantized:
        largest = list(line.by_size.values())[-1]
        share = 100 * largest.bytes_share
        noise = math.nan if largest.sqnr_db is None else largest.sqnr_db
        cells = [Cell(line.label), Cell(number(share, 1), share), Cell(number(noise, 1), noise)]
        against = (dict.fromkeys(line.by_size, 1.0), best)  # NCCL is as fast as itself
        rows.append((*cells, *(Cell(_ahead_text(line.ratios(), theirs)) for theirs in against)))
    return Table(tuple(columns), tuple(rows))


def _ahead_text(ours: dict[int, float], theirs: dict[int, float]) -> str:
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return "not compared"
    start = ahead_from(ours, theirs)
    if start is not None:
        return f"from {size_text(start)}"
    won = [size_text(size) for size in both if ours[size] > theirs[size]]
    return f"only at {', '.join(won)}" if won else "never"


def _link_table(lines: Sequence[Line], sizes: Sequence[int]) -> Table:
    rows = []
    for line in lines:
        found = [line.by_size[size].link_fraction if size in line.by_size else None for size in sizes]
        cells = [Cell("") if share is None else Cell(number(100 * share, 1), share) for share in found]
        rows.append((Cell(line.label), *cells))
    return Table((Column("", words=True), *(Column(size_text(size)) for size in sizes)), tuple(rows))


def _notes(stem: str, place: Place) -> list[str]:
    record = record_name(stem, place.link, place.world_size)
    notes = [f"Hardware, versions and the command of the last run are in {record}."]
    if all(row.ratio_to_nccl is None for row in place.rows):
        notes.append("NCCL was not measured here, so nothing is compared: it needs a GPU for every rank.")
    for label in dict.fromkeys(row.label for row in place.rows if not row.takes_the_link):
        notes.append(
            f"{label}: writes into the other GPUs' memory, past this link; its times are shown, and nothing is "
            "compared with them."
        )
    return notes
