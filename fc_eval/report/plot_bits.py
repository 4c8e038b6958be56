"""Perplexity over effective bits, a line per group size."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator

from fc_eval.report.figure import (
    COLORS,
    INK,
    MARKERS,
    Plot,
    figure_with_axes,
    finish,
    log_if_wide,
    styled,
    symlog_if_wide,
)
from fc_eval.report.groups import Group, find
from fc_eval.report.intervals import ln_interval, sides
from fc_eval.results.compare import Paired
from fc_eval.results.delta import Delta

Point = tuple[float, Delta]


def bits_plots(group: Group) -> list[Plot]:
    """One plot per text: a line per group size; mixed formats (INT4 reduce, INT8 gather) as single points."""
    return [plot for name in group.perplexities() if (plot := _bits_plot(group, name)) is not None]


def _bits_plot(group: Group, name: str) -> Plot | None:
    lines: dict[tuple[str, ...], list[Point]] = {}
    for pair in group.pairs:
        d, bits = find(pair, name, "perplexity"), pair.record.wire_number("effective_bits")
        if pair.record.arm.reduce_format and d and math.isfinite(d.value) and math.isfinite(bits):
            lines.setdefault(_series(pair), []).append((bits, d))
    if max((len({bits for bits, _ in points}) for points in lines.values()), default=0) < 2:
        return None
    label = group.evals[name].label
    plot_name = f"perplexity_over_bits_{group.slug}_{name}"
    with styled(plot_name):
        figure, panels = figure_with_axes(9.6, 3.6, 2)
        for place, (series, points) in enumerate(sorted(lines.items(), key=_series_order)):
            text = ",\n".join(_varying(series, list(lines)))
            style: dict[str, Any] = {
                "color": COLORS[place % len(COLORS)],
                "marker": MARKERS[place % len(MARKERS)],
                "linestyle": "-" if series[-1] == "" else "none",
                "label": text,
            }
            _draw(panels, sorted(points, key=lambda p: p[0]), style)
        values = [d.value for points in lines.values() for _, d in points]
        base = next((d.value for p in group.pairs if p.record.is_baseline and (d := find(p, name, "perplexity"))), None)
        if base is not None:
            panels[0].axhline(base, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            values.append(base)
        log_if_wide(panels[0], values)
        title = f"{label} perplexity" + (f"; dashed: baseline {base:.2f}" if base is not None else "")
        panels[0].set_title(title, loc="left")
        ratios = [d.ln_ratio for points in lines.values() for _, d in points]
        panels[1].axhline(0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        panels[1].set_title("ln(PPL ratio)", loc="left")
        symlog_if_wide(panels[1], ratios, "y")
        for axes in panels:
            axes.set_xlabel("effective bits per value on the wire")
            axes.xaxis.set_major_locator(MultipleLocator(1))
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, title="group size", alignment="left", loc="outside right upper")
        caption = f"{label}: perplexity and ln(PPL ratio) over bits, 95 % intervals of the paired delta; {group.title}."
        return finish(plot_name, caption, figure, wide=True)


def _draw(panels: list[Axes], points: list[Point], style: dict[str, Any]) -> None:
    """One line in both panels: perplexity, and its logarithm relative to the baseline."""
    x = [bits for bits, _ in points]
    reach = [[max(0.0, d.delta - d.low) if d.low == d.low else 0.0 for _, d in points]]
    reach.append([max(0.0, d.high - d.delta) if d.high == d.high else 0.0 for _, d in points])
    panels[0].errorbar(x, [d.value for _, d in points], yerr=reach, capsize=2, **style)
    known = [(bits, interval) for bits, d in points if (interval := ln_interval(d)) is not None]
    if known:
        middle = [interval[0] for _, interval in known]
        panels[1].errorbar([bits for bits, _ in known], middle, yerr=sides([i for _, i in known]), capsize=2, **style)


def _series(pair: Paired) -> tuple[str, ...]:
    """What a line stands for: group size, algorithm, kind, suffixes, policy, and the mix of formats if they differ."""
    arm = pair.record.arm
    if arm.algorithm == "peer":  # a system's name for the kind: 'QuickReduce Q4'
        group = f"g{arm.group_size}" if arm.group_size else "by shape"
        return group, "", arm.label.partition(",")[0].rpartition(" ")[0], "", arm.policy, ""
    base, _, *suffixes = (arm.reduce_format or "").split("-")
    gather = (arm.gather_format or arm.reduce_format or "").split("-")[0]
    kind = "INT" if base.startswith("int") else "FP" if base.startswith("fp") else "MX"
    mix = "" if gather == base else f"{base.upper()} reduce, {gather.upper()} gather"
    group = "token" if arm.group_size == "token" else f"g{arm.group_size}"
    return group, arm.algorithm.replace("_", "-"), kind, "-".join(suffixes), arm.policy, mix


def _series_order(item: tuple[tuple[str, ...], list[Point]]) -> tuple[object, ...]:
    size = item[0][0].removeprefix("g")
    return item[0][-1] != "", int(size) if size.isdigit() else math.inf, item[0]


def _varying(series: tuple[str, ...], others: list[tuple[str, ...]]) -> list[str]:
    """The group size, and of all else what is not the same for every line."""
    rest = [part for i, part in enumerate(series) if i and part and len({other[i] for other in others}) > 1]
    return [series[0], *rest]
