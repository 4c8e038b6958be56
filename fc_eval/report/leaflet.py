"""A short page on one question: remarks, tables and plots, as Markdown, as HTML and on the screen."""

from dataclasses import dataclass
from pathlib import Path

from fc_eval.errors import os_error
from fc_eval.report.figure import Plot
from fc_eval.report.html import render
from fc_eval.report.markdown import escape, image_markdown, markdown_table
from fc_eval.report.tables import Table
from fc_eval.results.text import align_points, text_table


@dataclass(frozen=True)
class Leaflet:
    """What the page says: its title, a first sentence, remarks, tables with their headings, plots."""

    title: str
    lede: str
    notes: tuple[str, ...]
    tables: tuple[tuple[str, Table], ...]
    plots: tuple[Plot, ...] = ()

    def as_text(self) -> str:
        """For the screen."""
        parts = [f"{self.title}\n{self.lede}"]
        parts += [f"{title}\n{screen_table(table)}" for title, table in self.tables]
        return "\n\n".join([*parts, "\n".join(self.notes)]).rstrip()

    def as_markdown(self) -> str:
        """A page with its plots in `plots/` beside it."""
        parts = [f"# {escape(self.title)}", escape(self.lede), "\n".join(f"- {escape(note)}" for note in self.notes)]
        for title, table in self.tables:
            parts += [f"## {escape(title)}", markdown_table(table)]
        return "\n\n".join([*filter(None, parts), *map(image_markdown, self.plots)]) + "\n"

    def as_html(self) -> str:
        """One page that needs nothing beside it."""
        return render("leaflet.html", self)

    def write(self, folder: Path, name: str) -> list[Path]:
        """Writes `NAME.md`, `NAME.html` and the plots.

        Raises:
            FcEvalError: the folder cannot be written.
        """
        try:
            (folder / "plots").mkdir(parents=True, exist_ok=True)
            paths = [folder / f"{name}.html", folder / f"{name}.md"]
            paths[0].write_text(self.as_html(), encoding="utf-8")
            paths[1].write_text(self.as_markdown(), encoding="utf-8")
            return paths + [path for plot in self.plots for path in plot.save(folder / "plots")]
        except OSError as error:
            raise os_error(error, folder, "choose another folder with out=DIR") from None


def screen_table(table: Table) -> str:
    """A table for the screen, numbers with their points under each other."""
    columns = [
        list(texts) if column.words else align_points(texts)
        for column, texts in zip(table.columns, zip(*table.texts(), strict=True), strict=True)
    ]
    rows = [list(row) for row in zip(*columns, strict=True)]
    leading = next((i for i, column in enumerate(table.columns) if not column.words), len(table.columns))
    over = [column.over for column in table.columns]
    return text_table([column.title for column in table.columns], rows, left=leading, over=over)
