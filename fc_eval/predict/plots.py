"""Plots of a decision: loss over predicted time with the front, and the speed-up of an all-reduce over its message."""

import math
from collections.abc import Sequence

from fc_eval.predict.break_even import UNQUANTIZED
from fc_eval.predict.decision import Choice, front_of, loss_of
from fc_eval.predict.losses import Losses
from fc_eval.predict.machine import Machine
from fc_eval.predict.model import all_reduce
from fc_eval.predict.work import WIDTH, Prefill
from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled, symlog_if_wide

# Messages, as powers of two in KiB: 64 KiB to 1 GiB.
KIB = tuple(2**power for power in range(6, 21))
TICKS = {2**power: f"{2**power} KiB" if power < 10 else f"{2 ** (power - 10)} MiB" for power in range(6, 21, 2)}


def decision_plots(found: Sequence[Choice], prefill: Prefill, machine: Machine, losses: Losses | None) -> list[Plot]:
    """The front where two comms have a loss, and the speed-up over the message."""
    plots = []
    if losses is not None and sum(not math.isnan(loss_of(choice)) for choice in found[1:]) > 1:
        plots.append(_front_plot(found, machine, losses))
    return [*plots, _message_plot(found, prefill, machine)]


def _front_plot(found: Sequence[Choice], machine: Machine, losses: Losses) -> Plot:
    name = "decision_front"
    places = {
        i: (1e3 * choice.time.total_s, loss_of(choice))
        for i, choice in enumerate(found)
        if not math.isnan(loss_of(choice))
    }
    best = sorted(front_of(found), key=lambda i: places[i])
    with styled(name):
        figure, (axes,) = figure_with_axes(6.4, 4.0)
        for i, (x, y) in places.items():
            axes.plot([x], [y], marker="o" if i in best else "s", color=COLORS[0] if i in best else COLORS[7])
            axes.annotate(found[i].label, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=7, color=INK)
        axes.plot([places[i][0] for i in best], [places[i][1] for i in best], color=INK, linewidth=0.9, zorder=1)
        axes.set_xlabel("predicted time to first token, ms")
        what = f"ln(PPL ratio), {losses.perplexity}" if losses.perplexity else f"points lost / 100, {losses.accuracy}"
        axes.set_ylabel(f"measured {what}")
        symlog_if_wide(axes, [y for _, y in places.values()], "y")
        caption = f"Measured loss over predicted time, {machine.label}; the line is the Pareto front."
        return finish(name, caption, figure)


def _message_plot(found: Sequence[Choice], prefill: Prefill, machine: Machine) -> Plot:
    name = "decision_message"
    hidden, world_size = prefill.shape.hidden, prefill.world_size
    rows = [max(1, kib * 1024 // (hidden * WIDTH)) for kib in KIB]
    base = [all_reduce(UNQUANTIZED, world_size, count, hidden, machine).total_s for count in rows]
    sizes = [count * hidden * WIDTH / 1024 for count in rows]
    with styled(name):
        figure, (axes,) = figure_with_axes(6.4, 4.0)
        for k, choice in enumerate(choice for choice in found if not choice.is_unquantized):
            ours = [all_reduce(choice.comm, world_size, count, hidden, machine).total_s for count in rows]
            axes.plot(
                sizes,
                [theirs / own for theirs, own in zip(base, ours, strict=True)],
                label=choice.label,
                color=COLORS[k % len(COLORS)],
                marker=MARKERS[k % len(MARKERS)],
                markersize=3,
            )
        axes.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.axvline(prefill.rows * hidden * WIDTH / 1024, color=INK, linewidth=0.6, linestyle=(0, (1, 3)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(TICKS), list(TICKS.values()), fontsize=8)
        axes.set_xlabel("message in bf16 (dotted: of this prefill)")
        axes.set_ylabel("predicted speed-up of the all-reduce")
        axes.legend()
        caption = f"A comm pays where its line is above 1; {machine.label}, W = {world_size}."
        return finish(name, caption, figure)
