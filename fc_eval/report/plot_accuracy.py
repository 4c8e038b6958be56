"""Accuracy over effective bits."""

import math
from typing import Any

from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled
from fc_eval.report.groups import Group
from fc_eval.report.intervals import points_interval, sides
from fc_eval.report.pareto import bits_of


def accuracy_plots(group: Group) -> list[Plot]:
    """The one accuracy that stands for a run, as points below the baseline, over bits; none for fewer than two runs."""
    found = []
    for label, pair in zip(group.labels, group.pairs, strict=True):
        d = group.accuracy(pair)
        interval = points_interval(d)
        if pair.record.arm.reduce_format is not None and d is not None and interval and math.isfinite(bits_of(pair)):
            found.append((label, bits_of(pair), d, interval))
    if len(found) < 2:
        return []
    first = found[0][2]
    plot_name = f"accuracy_over_bits_{group.slug}"
    with styled(plot_name):
        figure, (axes,) = figure_with_axes(7.2, 3.8)
        for k, (label, bits, _, interval) in enumerate(found):
            style: dict[str, Any] = {
                "color": COLORS[k % len(COLORS)],
                "marker": MARKERS[k % len(MARKERS)],
                "linestyle": "none",
            }
            axes.errorbar([bits], [interval[0]], yerr=sides([interval]), capsize=2, label=label, **style)
        axes.axhline(0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set_title(f"{first.label}, points from the baseline's {100 * first.baseline:.2f} %", loc="left")
        axes.set_xlabel("effective bits per value on the wire")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        caption = f"{first.label}: paired difference over effective bits, 95 % intervals; {group.title}."
        return [finish(plot_name, caption, figure)]
