"""Paired deltas over the tensor-parallel size."""

import math
from collections.abc import Sequence

from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled, symlog_if_wide
from fc_eval.report.groups import Group, find
from fc_eval.report.intervals import ln_interval, sides
from fc_eval.results.delta import Delta


def tp_plots(groups: Sequence[Group]) -> list[Plot]:
    """ln(PPL ratio) over the tensor-parallel size, a line per comm, for comms that were run at two sizes or more."""
    plots = []
    for key in dict.fromkeys(_setting(group) for group in groups):
        members = [group for group in groups if _setting(group) == key]
        for name in dict.fromkeys(name for group in members for name in group.perplexities()):
            plot = _tp_plot(members, name)
            plots += [plot] if plot else []
    return plots


def _setting(group: Group) -> tuple[object, ...]:
    """All that groups of one plot share: everything but the tensor-parallel size."""
    arm = group.first.arm
    return arm.model, arm.weights, arm.dtype, group.first.device_type, tuple(group.evals.values())


def _tp_plot(groups: Sequence[Group], name: str) -> Plot | None:
    lines: dict[str, dict[int, Delta]] = {}
    for group in groups:
        for label, pair in zip(group.labels, group.pairs, strict=True):
            d = find(pair, name, "perplexity")
            if not pair.record.is_baseline and d is not None and math.isfinite(d.ln_ratio):
                lines.setdefault(label, {})[pair.record.arm.tp] = d
    lines = {label: by_tp for label, by_tp in lines.items() if len(by_tp) > 1}
    if not lines:
        return None
    first = groups[0].first.arm
    info = next(group.evals[name] for group in groups if name in group.evals)
    plot_name = f"delta_over_tp_{first.model}_{first.dtype}_{groups[0].first.device_type}_{name}_{info.samples}"
    plot_name = "".join(c if c.isalnum() or c in "._-" else "-" for c in plot_name)
    with styled(plot_name):
        figure, (axes,) = figure_with_axes(6.4, 3.6)
        sizes = sorted({tp for by_tp in lines.values() for tp in by_tp})
        for k, (label, by_tp) in enumerate(lines.items()):
            known = sorted(by_tp)
            axes.errorbar(
                [sizes.index(tp) for tp in known],
                [by_tp[tp].ln_ratio for tp in known],
                yerr=sides([span for tp in known if (span := ln_interval(by_tp[tp]))]),
                marker=MARKERS[k % len(MARKERS)],
                color=COLORS[k % len(COLORS)],
                capsize=2,
                label=label,
            )
        symlog_if_wide(axes, [d.ln_ratio for by_tp in lines.values() for d in by_tp.values()], "y")
        axes.axhline(0, color=INK, linewidth=0.9)
        axes.set_xticks(range(len(sizes)), [str(tp) for tp in sizes])
        axes.set_xlabel("tensor-parallel size")
        axes.set_ylabel(f"ln(PPL ratio), {info.label}")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        caption = (
            f"Paired delta on {info.label} over the tensor-parallel size, 95 % intervals; {first.model}, {first.dtype}."
        )
        return finish(plot_name, caption, figure)
