"""Tables and pages as Markdown."""

from collections.abc import Iterable

from fc_eval.report.experiments import ExperimentSection
from fc_eval.report.figure import Plot
from fc_eval.report.groups import group_pairs
from fc_eval.report.page import Page
from fc_eval.report.tables import Table, summary_table
from fc_eval.results.compare import pair_runs
from fc_eval.results.record import RunRecord


def escape(text: str) -> str:
    """One line of plain text inside a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _code(text: str) -> str:
    """A command inside a table cell, to be copied as it stands; a pipe alone would end the cell."""
    return "`" + " ".join(text.split()).replace("|", "\\|") + "`"


def markdown_table(table: Table) -> str:
    """A pipe table; numbers are right-aligned."""
    lines = [
        "| " + " | ".join(escape(c.flat) for c in table.columns) + " |",
        "| " + " | ".join("---" if c.words else "---:" for c in table.columns) + " |",
    ]
    for row in table.texts():
        cells = (_code(text) if column.code else escape(text) for column, text in zip(table.columns, row, strict=True))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def first_table_markdown(records: Iterable[RunRecord]) -> str:
    """The summary of a set of runs as Markdown, for a README: a table per baseline, headed where there are several."""
    groups = group_pairs(pair_runs(records))
    parts = []
    for group in groups:
        if len(groups) > 1:
            parts.append(f"**{group.title}**")
        parts.append(markdown_table(summary_table(group, divergence=False)))
        parts.append(f"{group.title}. {group.samples}.")
    return "\n\n".join(parts)


def page_markdown(page: Page) -> str:
    """A whole report as Markdown, with its plots as PNG files in `plots/` beside it."""
    parts = [f"# {page.title}", page.lede]
    parts += [f"**{model}**: {'; '.join(notes)}." for model, notes in page.models]
    if page.warnings:
        parts += ["**Before reading:**", "\n".join(f"- {escape(text)}" for text in page.warnings)]
    for experiment in page.experiments:
        parts += _experiment(experiment)
    for section in page.sections:
        parts += [f"## {section.title}", f"{section.samples}.", markdown_table(section.summary), *section.notes]
        for title, table in section.layers:
            parts += [f"**{title}**", markdown_table(table)]
        parts += [image_markdown(plot) for plot in section.plots]
        parts.append("### All numbers")
        for title, table in section.details:
            parts += [f"**{title}**", markdown_table(table)]
    if page.across:
        parts += ["## Across tensor-parallel sizes", *map(image_markdown, page.across)]
    if page.problems:
        parts += ["## Runs without numbers", markdown_table(page.problems)]
    parts += ["## How to read this", "\n".join(f"- **{term}**: {text}" for term, text in page.guide)]
    parts += ["## Provenance", *map(markdown_table, (page.environments, page.protocols, page.runs))]
    return "\n\n".join(parts) + "\n"


def _experiment(section: ExperimentSection) -> list[str]:
    """The section of one experiment."""
    parts = [f"## {section.title}", "\n".join(f"- **{term}**: {escape(text)}" for term, text in section.facts)]
    for title, table in section.tables:
        parts += [f"**{title}**", markdown_table(table)]
    for part in section.parts:
        parts += [f"### {part.title}", f"{part.samples}.", markdown_table(part.summary), *part.notes]
        for title, table in part.tables:
            parts += [f"**{title}**", markdown_table(table)]
        parts += map(image_markdown, part.plots)
    return [*parts, *map(image_markdown, section.across)]


def image_markdown(plot: Plot) -> str:
    """A plot beside the page, in `plots/`, with its caption."""
    return f"![{escape(plot.caption)}](plots/{plot.name}.png)\n\n*{escape(plot.caption)}*"
