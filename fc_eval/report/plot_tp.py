"""Paired deltas over the tensor-parallel size."""

import math
from collections.abc import Sequence

from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled, symlog_if_wide
from fc_eval.report.groups import Group, distinct, file_name, find
from fc_eval.report.intervals import ln_interval, sides
from fc_eval.results.delta import Delta

# Of one text: by label, then by tensor-parallel size.
Lines = dict[str, dict[int, Delta]]


def tp_plots(groups: Sequence[Group]) -> list[Plot]:
    """ln(PPL ratio) over the tensor-parallel size, a line per comm, for comms that were run at two sizes or more."""
    found: list[tuple[str, Lines, list[Group], str]] = []
    for shared in dict.fromkeys(group.setting_without_tp for group in groups):
        members = [group for group in groups if group.setting_without_tp == shared]
        for name in dict.fromkeys(name for group in members for name in group.perplexities()):
            lines = _lines(members, name)
            if lines:
                title = members[0].heading(tp=False, detail=False)
                found.append((file_name(f"delta_over_tp_{title}_{name}"), lines, members, name))
    names = distinct([plot_name for plot_name, *_ in found])
    return [_tp_plot(each, *rest[1:]) for each, rest in zip(names, found, strict=True)]


def _lines(groups: Sequence[Group], name: str) -> Lines:
    """Deltas by label and tensor-parallel size; a label that stands for different comms gives no line."""
    lines: Lines = {}
    comms: dict[str, set[str]] = {}
    for group in groups:
        for label, pair in zip(group.labels, group.pairs, strict=True):
            d = find(pair, name, "perplexity")
            if not pair.record.is_baseline and d is not None and math.isfinite(d.ln_ratio):
                lines.setdefault(label, {})[pair.record.arm.tp] = d
                comms.setdefault(label, set()).add(pair.record.arm.comm_full)
    return {label: by_tp for label, by_tp in lines.items() if len(by_tp) > 1 and len(comms[label]) == 1}


def _tp_plot(plot_name: str, lines: Lines, groups: Sequence[Group], name: str) -> Plot:
    info = next(group.evals[name] for group in groups if name in group.evals)
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
        axes.set_ylabel(f"ln(PPL ratio), {info.label}")
        symlog_if_wide(axes, [d.ln_ratio for by_tp in lines.values() for d in by_tp.values()], "y")
        axes.axhline(0, color=INK, linewidth=0.9)
        axes.set_xticks(range(len(sizes)), [str(tp) for tp in sizes])
        axes.set_xlabel("tensor-parallel size")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        title = groups[0].heading(tp=False)
        caption = f"Paired delta on {info.label} over the tensor-parallel size, 95 % intervals; {title}."
        return finish(plot_name, caption, figure)
