"""Perplexity over the group size, a line per format."""

import math

from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, log_if_wide, styled
from fc_eval.report.groups import Group, find
from fc_eval.results.compare import Paired
from fc_eval.results.delta import Delta


def group_size_plots(group: Group) -> list[Plot]:
    """One plot per text, for formats that were run with two group sizes or more; a whole token is the largest."""
    return [plot for name in group.perplexities() if (plot := _plot(group, name)) is not None]


def _plot(group: Group, name: str) -> Plot | None:
    lines: dict[str, dict[str, Delta]] = {}
    for pair in group.pairs:
        d = find(pair, name, "perplexity")
        if pair.record.arm.reduce_format is not None and d is not None and math.isfinite(d.value):
            lines.setdefault(_series(pair), {})[str(pair.record.arm.group_size)] = d
    lines = {series: by_size for series, by_size in lines.items() if len(by_size) > 1}
    if not lines:
        return None
    sizes = sorted({size for by_size in lines.values() for size in by_size}, key=_size)
    label = group.evals[name].label
    plot_name = f"perplexity_over_group_size_{group.slug}_{name}"
    with styled(plot_name):
        figure, (axes,) = figure_with_axes(6.4, 3.8)
        values = []
        for k, (series, by_size) in enumerate(lines.items()):
            known = [size for size in sizes if size in by_size]
            found = [by_size[size] for size in known]
            axes.errorbar(
                [sizes.index(size) for size in known],
                [d.value for d in found],
                yerr=[[_reach(d.delta, d.low) for d in found], [_reach(d.high, d.delta) for d in found]],
                color=COLORS[k % len(COLORS)],
                marker=MARKERS[k % len(MARKERS)],
                capsize=2,
                label=series,
            )
            values += [d.value for d in found]
        base = next((d.value for p in group.pairs if p.record.is_baseline and (d := find(p, name, "perplexity"))), None)
        if base is not None:
            axes.axhline(base, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            values.append(base)
        log_if_wide(axes, values)
        axes.set_title(
            f"{label} perplexity" + (f"; dashed: baseline {base:.2f}" if base is not None else ""), loc="left"
        )
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set_xlabel("group size, values")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        caption = f"{label}: perplexity over the group size, 95 % intervals of the paired delta; {group.title}."
        return finish(plot_name, caption, figure)


def _series(pair: Paired) -> str:
    """Format without its group size, and whatever else is not the usual: 'INT4 sym', 'ring INT4, o_proj_only'."""
    arm = pair.record.arm
    texts = []
    for base, *suffixes in (name.split("-") for name in (arm.reduce_format, arm.gather_format) if name):
        texts.append(" ".join([base.upper(), *(s for s in suffixes if s != "asym" and not _is_group(s))]))
    algorithm = "" if arm.algorithm == "two_step" else f"{arm.algorithm.replace('_', '-')} "
    policy = "" if arm.policy == "uniform" else f", {arm.policy}"
    return algorithm + "/".join(dict.fromkeys(texts)) + policy


def _is_group(suffix: str) -> bool:
    return suffix == "gtoken" or (suffix[:1] == "g" and suffix[1:].isdigit())


def _size(size: str) -> float:
    return float(size) if size.isdigit() else math.inf


def _reach(high: float, low: float) -> float:
    return max(0.0, high - low) if high == high and low == low else 0.0
