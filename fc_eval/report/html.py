"""A whole report as one HTML page that needs nothing beside it: style, script and plots are inside."""

from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fc_eval.report.page import Page
from fc_eval.report.tables import Table
from fc_eval.results.text import align_points

FIGURE_SPACE, PUNCTUATION_SPACE = "\N{FIGURE SPACE}", "\N{PUNCTUATION SPACE}"


def page_html(page: Page) -> str:
    """Renders `template.html`, the report."""
    return render("template.html", page)


def render(template: str, page: object) -> str:
    """Renders a template of this folder as `page`, with `style.css`, `sort.js` and its plots as inline SVG."""
    here = files("fc_eval.report")

    def text(name: str) -> str:
        return (here / name).read_text(encoding="utf-8")

    environment = Environment(
        loader=FunctionLoader(text), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(cells=_cells, headings=_headings, svg=lambda plot: Markup(plot.inline_svg))
    return environment.get_template(template).render(
        page=page, style=Markup(text("style.css")), script=Markup(text("sort.js"))
    )


def _cells(table: Table) -> list[list[tuple[str, str]]]:
    """Per row, text and sort key of each cell; numbers padded so that their points stand under each other."""
    columns = [
        list(texts) if column.words else align_points(texts, FIGURE_SPACE, PUNCTUATION_SPACE)
        for column, texts in zip(table.columns, zip(*table.texts(), strict=True), strict=True)
    ]
    return [
        [(columns[j][i], "" if cell.sort != cell.sort else f"{cell.sort:.10g}") for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]


def _headings(table: Table) -> list[tuple[str, int]]:
    """Shared headings with the number of columns below each; empty where no column has one."""
    spans: list[tuple[str, int]] = []
    for column in table.columns:
        if spans and spans[-1][0] == column.over:
            spans[-1] = (column.over, spans[-1][1] + 1)
        else:
            spans.append((column.over, 1))
    return spans if any(text for text, _ in spans) else []
