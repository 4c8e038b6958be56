"""Loss over bits and over bytes per rank, with the Pareto front of each."""

from typing import Any

from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled, symlog_if_wide
from fc_eval.report.groups import Group
from fc_eval.report.pareto import Candidate, bits_of, bytes_share, candidates, front

_PANELS = ((bits_of, "effective bits per value"), (bytes_share, "bytes per rank, % of unquantized"))
# Beside more points than these, names would cover one another.
NAMED = 8


def pareto_plots(group: Group) -> list[Plot]:
    """One plot per text with two panels; points by kind of format and algorithm, the front as a line with names."""
    return [_pareto_plot(group, name) for name in group.perplexities() if len(candidates(group, name)) > 2]


def _pareto_plot(group: Group, name: str) -> Plot:
    known = candidates(group, name)
    kinds = list(dict.fromkeys(map(_kind, known)))
    label = group.evals[name].label
    plot_name = f"pareto_{group.slug}_{name}"
    with styled(plot_name):
        figure, panels = figure_with_axes(9.6, 4.0, 2, share_y=True)
        for axes, (cost, title) in zip(panels, _PANELS, strict=True):
            for k, kind in enumerate(kinds):
                members = [(cost(pair), d.ln_ratio) for label, pair, d in known if _kind((label, pair, d)) == kind]
                style: dict[str, Any] = {
                    "color": COLORS[k % len(COLORS)],
                    "marker": MARKERS[k % len(MARKERS)],
                    "linestyle": "none",
                }
                axes.plot([x for x, _ in members], [y for _, y in members], label=kind, **style)
            best = front([(cost(pair), d.ln_ratio) for _, pair, d in known])
            places = [(cost(known[i][1]), known[i][2].ln_ratio) for i in best]
            axes.plot([x for x, _ in places], [y for _, y in places], color=INK, linewidth=0.9, zorder=1)
            for i, place in zip(best, places, strict=True) if len(best) <= NAMED else ():
                axes.annotate(known[i][0], place, xytext=(5, 5), textcoords="offset points", fontsize=7, color=INK)
            axes.axhline(0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_xlabel(title)
        panels[0].set_ylabel(f"ln(PPL ratio), {label}")
        symlog_if_wide(panels[0], [d.ln_ratio for _, _, d in known], "y")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper")
        caption = (
            f"{label}: loss over effective bits and over bytes per rank; the line is the Pareto front; {group.title}."
        )
        return finish(plot_name, caption, figure, wide=True)


def _kind(candidate: Candidate) -> str:
    """'INT', 'MX, one-step', 'INT + spikes': what points of one colour share."""
    arm = candidate[1].record.arm
    base, *suffixes = (arm.reduce_format or "").split("-")
    kind = next((text for start, text in (("mx", "MX"), ("int", "INT"), ("fp", "FP")) if base.startswith(start)), base)
    kind += " + spikes" if "sr" in suffixes else " + rotation" if "had" in suffixes else ""
    mix = ", mixed" if arm.gather_format not in (None, arm.reduce_format) else ""
    return kind + mix + ("" if arm.algorithm == "two_step" else f", {arm.algorithm.replace('_', '-')}")
