"""How plots look and how they are saved: the same bytes for the same numbers, as PNG, as SVG, and inside a page."""

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, ScalarFormatter
from PIL import Image

# Mid-tone colours that can be told apart on white and on black paper, and by most colour-blind readers.
COLORS = ("#3a7bd5", "#d9822b", "#2a9d6f", "#b5539c", "#c9473f", "#1c9bb0", "#8c7a35", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Text and axes have one ink, which a page replaces by its own text colour.
INK = "#202124"
GREY = "#808080"
PNG_COLOURS = 64

STYLE = {
    "font.size": 10,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.unicode_minus": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Plot:
    """A finished plot: a stable file name without suffix, a caption, the SVG text, the PNG bytes, and whether it wants
    the page's whole width."""

    name: str
    caption: str
    svg: str
    png: bytes
    wide: bool = False

    def save(self, folder: Path) -> list[Path]:
        """Writes `<name>.svg` and `<name>.png`."""
        paths = [folder / f"{self.name}.svg", folder / f"{self.name}.png"]
        paths[0].write_text(self.svg, encoding="utf-8")
        paths[1].write_bytes(self.png)
        return paths

    @property
    def inline_svg(self) -> str:
        """The SVG for use inside a page: no header, no metadata, ids of its own, text in the page's colour."""
        text = self.svg[self.svg.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
        text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
        text = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', text)
        text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r"'DejaVu Sans', sans-serif", "inherit", text)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text))
        return text.replace(INK, "currentColor").replace(
            "<svg ", f'<svg role="img" aria-label="{html.escape(self.caption)}" ', 1
        )


@contextmanager
def styled(name: str) -> Iterator[None]:
    """Draws and saves in the report's style; ids inside the SVG depend on the plot's name alone."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        yield


def finish(name: str, caption: str, figure: Figure, wide: bool = False) -> Plot:
    """Renders a figure twice; without dates, so that equal numbers give equal files."""
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", bbox_inches="tight", pad_inches=0.05, transparent=True, metadata={"Date": None})
    figure.savefig(png, format="png", dpi=120, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    return Plot(name, caption, svg.getvalue(), _with_palette(png), wide)


def _with_palette(png: io.BytesIO) -> bytes:
    """A PNG of a third of the size: lines, text and their edges on white have few colours."""
    small = io.BytesIO()
    Image.open(png).convert("RGB").quantize(PNG_COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def figure_with_axes(
    width_in: float, height_in: float, columns: int = 1, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with one row of axes."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, sharey=share_y)
    return figure, list(axes[0])


def log_if_wide(axes: Axes, values: list[float]) -> None:
    """A logarithmic scale with plain numbers for positive values of more than a factor of 2, on the y axis."""
    if max(values) <= 2 * min(values):
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    if max(values) < 20 * min(values):
        axes.yaxis.set_major_locator(MaxNLocator(6))


def symlog_if_wide(axes: Axes, values: list[float], axis: str) -> None:
    """A symmetric logarithmic scale where values span more than a factor of 50, and a word about it in the label.

    Args:
        axes: what is scaled; its label is set already.
        values: what it shows.
        axis: 'x' or 'y'.
    """
    sizes = sorted(abs(v) for v in values if v and v == v)
    if not sizes or sizes[-1] <= 50 * sizes[0]:
        return
    threshold = max(sizes[len(sizes) // 4], sizes[-1] / 1000)  # linear for about the smaller quarter of the values
    {"x": axes.set_xscale, "y": axes.set_yscale}[axis]("symlog", linthresh=threshold, linscale=1.0)
    known = [v for v in values if v == v]
    if min(known) >= 0:  # no empty decades on the other side of zero
        low, high = getattr(axes.dataLim, f"interval{axis}")  # the ends of intervals too
        axes.set(**{f"{axis}lim": (min(-0.2 * threshold, 1.2 * low), max(2 * max(known), 1.2 * high))})
    scaled = {"x": axes.xaxis, "y": axes.yaxis}[axis]

    def text(v: float, _: int) -> str:
        # The locator's lowest decade lies inside the linear part, where its number may stand on that of zero.
        return "" if 0 < abs(v) < 0.999 * threshold else f"{v:g}".replace("-", "\N{MINUS SIGN}")

    scaled.set_major_formatter(FuncFormatter(text))
    scaled.set_label_text(f"{scaled.get_label_text()}\n(logarithmic beyond ±{threshold:.2g})".strip())
