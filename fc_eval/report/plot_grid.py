"""The change of perplexity over bits x group size, where the runs fill a grid."""

import math

import matplotlib
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle

from fc_eval.report.figure import Plot, figure_with_axes, finish, styled
from fc_eval.report.groups import Group, find
from fc_eval.results.delta import Delta


def grid_plots(group: Group) -> list[Plot]:
    """One heat map per text: ln(PPL ratio) over bits and group size, for grids of at least 2 x 2."""
    return [plot for name in group.perplexities() if (plot := _grid_plot(group, name)) is not None]


def _grid_plot(group: Group, name: str) -> Plot | None:
    cells: dict[tuple[str, str], Delta] = {}
    for pair in group.pairs:
        arm, d = pair.record.arm, find(pair, name, "perplexity")
        plain = arm.algorithm == "two_step" and arm.reduce_format == arm.gather_format and arm.policy == "uniform"
        if arm.reduce_format is None or not plain or d is None or not math.isfinite(d.ln_ratio):
            continue
        base, _, *suffixes = arm.reduce_format.split("-")
        if suffixes == ["asym"]:
            cells[base.upper(), str(arm.group_size)] = d
    rows = sorted({base for base, _ in cells}, reverse=True)
    columns = sorted({size for _, size in cells}, key=lambda s: (not s.isdigit(), int(s) if s.isdigit() else 0))
    if len(rows) < 2 or len(columns) < 2 or len(cells) < 0.75 * len(rows) * len(columns):
        return None
    values = [[cells[r, c].ln_ratio if (r, c) in cells else math.nan for c in columns] for r in rows]
    label = group.evals[name].label
    plot_name = f"perplexity_grid_{group.slug}_{name}"
    with styled(plot_name):
        figure, (axes,) = figure_with_axes(1.6 + 1.15 * len(columns), 1.0 + 0.5 * len(rows))
        floor = max(1e-4, min((abs(v) for row in values for v in row if v), default=1e-4))
        top = max(floor * 10, max(v for row in values for v in row if v == v))
        scale = LogNorm(floor, top)
        shades = matplotlib.colormaps["Blues"]
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if value != value:
                    continue
                level = 0.05 + 0.8 * float(scale(min(top, max(floor, value))))
                axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=shades(level), lw=0))
                color = "#ffffff" if level > 0.55 else "#111111"
                axes.text(
                    j, i, _with_error(cells[rows[i], columns[j]]), ha="center", va="center", fontsize=8, color=color
                )
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("group size")
        axes.grid(visible=False)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        caption = f"ln(PPL ratio) on {label}, with its paired error, by bit width and group size; {group.title}."
        return finish(plot_name, caption, figure)


def _with_error(d: Delta) -> str:
    """ln ratio and error in two lines, both to the first digit of the error."""
    if not d.ln_ratio_stderr > 0:
        return f"{d.ln_ratio:.2g}"
    places = min(6, max(0, -math.floor(math.log10(d.ln_ratio_stderr))))
    return f"{d.ln_ratio:.{places}f}\n\N{PLUS-MINUS SIGN} {d.ln_ratio_stderr:.{places}f}"
