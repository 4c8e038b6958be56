"""Paired deltas with their intervals: a forest plot per group."""

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled, symlog_if_wide
from fc_eval.report.groups import Group, find
from fc_eval.report.intervals import Interval, ln_interval, points_interval, sides


def forest_plots(group: Group) -> list[Plot]:
    """ln(PPL ratio) of each text, and the accuracy delta, of every run against the baseline; none without deltas."""
    members = [
        (label, pair) for label, pair in zip(group.labels, group.pairs, strict=True) if not pair.record.is_baseline
    ]
    labels = [label for label, _ in members]
    losses = {
        group.evals[name].label: [ln_interval(find(pair, name, "perplexity")) for _, pair in members]
        for name in group.perplexities()
    }
    accuracies = [group.accuracy(pair) for _, pair in members]
    points = [points_interval(d) for d in accuracies]
    # Percentage points stay within a factor of ten or so, and intervals should look as symmetric as they are.
    panels: list[tuple[str, bool, dict[str, list[Interval | None]]]] = []
    if any(any(column) for column in losses.values()):
        panels.append(("ln(PPL ratio)\nworse →", True, losses))
    if any(points):
        known = next(d for d in accuracies if d is not None)
        panels.append((f"{known.label}, points\n← worse", False, {known.label: points}))
    if not panels:
        return []
    name = f"paired_deltas_{group.slug}"
    with styled(name):
        figure, all_axes = figure_with_axes(9.6, 1.1 + 0.34 * len(labels), len(panels), share_y=True)
        for axes, (title, may_be_logarithmic, columns) in zip(all_axes, panels, strict=True):
            _forest(axes, columns, title, may_be_logarithmic)
        all_axes[0].set_yticks(range(len(labels)), labels)
        all_axes[0].set_ylim(len(labels) - 0.4, -0.6)
        caption = f"Paired deltas against the baseline with 95 % intervals; {group.title}."
        return [finish(name, caption, figure, wide=True)]


def _forest(axes: Axes, columns: dict[str, list[Interval | None]], title: str, may_be_logarithmic: bool) -> None:
    axes.axvline(0, color=INK, linewidth=0.9)
    ends: list[float] = []
    for k, (label, intervals) in enumerate(columns.items()):
        shift = 0.16 * (k - (len(columns) - 1) / 2)
        known = [(i, interval) for i, interval in enumerate(intervals) if interval is not None]
        middle = [m for _, (m, _, _) in known]
        axes.errorbar(
            middle,
            [i + shift for i, _ in known],
            xerr=sides([interval for _, interval in known]),
            linestyle="none",
            marker=MARKERS[k % len(MARKERS)],
            color=COLORS[k % len(COLORS)],
            capsize=2,
            label=label,
        )
        ends += middle
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel(title)
    if may_be_logarithmic:
        symlog_if_wide(axes, ends, "x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if len(columns) > 1:
        axes.legend(loc="best")
