"""Perplexity deltas over the length of the window: does the error of communication grow with the context?"""

import math

from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled, symlog_if_wide
from fc_eval.report.groups import Group, find
from fc_eval.report.intervals import ln_interval, sides

# By window length, the name of the evaluation.
Lengths = dict[int, str]


def context_plots(group: Group) -> list[Plot]:
    """ln(PPL ratio) over window tokens, a line per comm, for each text that was cut into windows of several lengths."""
    return [_context_plot(group, protocol, lengths) for protocol, lengths in _texts(group).items() if len(lengths) > 1]


def _texts(group: Group) -> dict[str, Lengths]:
    """By protocol (and file of a text), the evaluations over it."""
    found: dict[str, Lengths] = {}
    for name in group.perplexities():
        said = next(pair.record.protocol.get(name, {}) for pair in group.pairs if name in pair.record.evals)
        protocol, tokens = said.get("protocol"), said.get("window_tokens")
        if isinstance(protocol, str) and isinstance(tokens, int):
            file = said.get("dataset") if said.get("where") == "file" else None
            found.setdefault(f"{protocol} {file}" if file else protocol, {})[tokens] = name
    return found


def _context_plot(group: Group, text: str, lengths: Lengths) -> Plot:
    plot_name = f"delta_over_window_{group.slug}_{text.replace(' ', '_')}"
    known = sorted(lengths)
    with styled(plot_name):
        figure, (axes,) = figure_with_axes(6.4, 3.6)
        ratios = []
        arms = [(n, p) for n, p in zip(group.labels, group.pairs, strict=True) if not p.record.is_baseline]
        for k, (label, pair) in enumerate(arms):
            deltas = [(tokens, find(pair, lengths[tokens], "perplexity")) for tokens in known]
            points = [(tokens, span) for tokens, d in deltas if (span := ln_interval(d)) is not None]
            if not points:
                continue
            ratios += [middle for _, (middle, _, _) in points]
            axes.errorbar(
                [tokens for tokens, _ in points],
                [middle for _, (middle, _, _) in points],
                yerr=sides([span for _, span in points]),
                marker=MARKERS[k % len(MARKERS)],
                color=COLORS[k % len(COLORS)],
                capsize=2,
                label=label,
            )
        axes.set_ylabel(f"ln(PPL ratio), {text}")
        symlog_if_wide(axes, [ratio for ratio in ratios if math.isfinite(ratio)], "y")
        axes.axhline(0, color=INK, linewidth=0.9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(known, [f"{tokens:,}" for tokens in known])
        axes.set_xlabel("window, tokens")
        if ratios:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        caption = f"Paired delta on {text} over the length of the window, 95 % intervals; {group.title}."
        return finish(plot_name, caption, figure)
