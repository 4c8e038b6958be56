"""Plots of measured all-reduces over the message size, over the number of blocks, and noise beside bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from fc_eval.bench.allreduce_rows import NCCL, AllReduceRow, Line, Place, size_text
from fc_eval.report.figure import COLORS, INK, MARKERS, Plot, figure_with_axes, finish, styled
from fc_eval.report.groups import file_name

# Beside each other, more labels of sizes than these would touch.
TICKS = 9


def place_plots(stem: str, place: Place) -> list[Plot]:
    """Speed beside NCCL and share of the link, where two sizes or more are known, and times over blocks.

    Args:
        stem: how the plots' names begin, so that those of two CSV files can lie in one folder.
        place: what is drawn.
    """
    slug = file_name("_".join([place.device, place.link, f"w{place.world_size}", *filter(None, [place.dtype])]))
    ratio = f"A comm is faster than NCCL in the same run where its line is above 1; {place.title}."
    share = f"What the busiest rank sends, over the time and the bandwidth of a plain copy in the run; {place.title}."
    plots = [
        _size_plot(f"{stem}_ratio_{slug}", ratio, place, _ratio, "times as fast as NCCL (dashed)", 1),
        _size_plot(f"{stem}_link_{slug}", share, place, _share, "share of the link, %", 100),
        _blocks_plot(f"{stem}_blocks_{slug}", place),
    ]
    return [plot for plot in plots if plot is not None]


def noise_plots(stem: str, places: Sequence[Place]) -> list[Plot]:
    """Signal over quantization noise beside bytes, a plot per W and dtype with two comms or more, whatever the link."""
    plots = []
    for world_size, dtype in sorted({(place.world_size, place.dtype) for place in places}):
        members = [place for place in places if (place.world_size, place.dtype) == (world_size, dtype)]
        largest = {line.label: list(line.by_size.values())[-1] for place in members for line in place.lines()}
        points = {
            label: (100 * row.bytes_share, row.sqnr_db) for label, row in largest.items() if row.sqnr_db is not None
        }
        if len(points) > 1:
            known = list(filter(None, [dtype]))
            name = "_".join([f"{stem}_noise_w{world_size}", *known])
            plots.append(_noise_plot(name, points, ", ".join([f"W = {world_size}", *known])))
    return plots


def _ratio(row: AllReduceRow) -> float | None:
    return None if row.implementation == NCCL else row.ratio_to_nccl  # NCCL itself is the dashed line


def _share(row: AllReduceRow) -> float | None:
    return None if row.link_fraction is None else 100 * row.link_fraction


def _size_plot(
    name: str, caption: str, place: Place, value: Callable[[AllReduceRow], float | None], title: str, line_at: float
) -> Plot | None:
    """A number over the message size; None where fewer than two sizes have one."""
    shown = [(k, line) for k, line in enumerate(place.lines()) if line.first.takes_the_link]
    known = {k: {size: y for size, row in line.by_size.items() if (y := value(row)) is not None} for k, line in shown}
    sizes = sorted({size for points in known.values() for size in points})
    if len(sizes) < 2:
        return None
    with styled(name):
        figure, (axes,) = figure_with_axes(8.0, 4.0)
        for k, line in shown:
            if known[k]:
                axes.plot(list(known[k]), list(known[k].values()), label=line.label, **_style(k, line))
        axes.axhline(line_at, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set_xscale("log", base=2)
        ticks = sizes[:: -(-len(sizes) // TICKS)]
        axes.set_xticks(ticks, [size_text(size) for size in ticks], fontsize=8)
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("message")
        axes.set_ylabel(title)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return finish(name, caption, figure)


def _style(k: int, line: Line) -> dict[str, Any]:
    """Of one line in every plot of a place: what does not quantize is drawn thin."""
    width = 1.0 if line.first.comm is None else 1.5
    return {"color": COLORS[k % len(COLORS)], "marker": MARKERS[k % len(MARKERS)], "linewidth": width}


def _blocks_plot(name: str, place: Place) -> Plot | None:
    """A panel per comm, a line per size; None where no comm has times of two numbers of blocks at one size."""
    panels: dict[str, dict[int, dict[int, float]]] = {}
    for row in place.rows:
        if row.blocks is not None:
            panels.setdefault(row.label, {}).setdefault(row.size_bytes, {})[row.blocks] = row.time_us
    for label, by_size in list(panels.items()):
        panels[label] = {size: times for size, times in sorted(by_size.items()) if len(times) > 1}
    panels = {label: by_size for label, by_size in panels.items() if by_size}
    if not panels:
        return None
    counts = sorted({count for by_size in panels.values() for times in by_size.values() for count in times})
    sizes = sorted({size for by_size in panels.values() for size in by_size})
    with styled(name):
        figure, all_axes = figure_with_axes(2.6 + 2.6 * len(panels), 3.6, len(panels), share_y=True)
        for axes, (label, by_size) in zip(all_axes, panels.items(), strict=True):
            for size, times in by_size.items():
                k, best = sizes.index(size), min(times.values())
                places = [counts.index(count) for count in sorted(times)]
                ratios = [times[count] / best for count in sorted(times)]
                style: dict[str, Any] = {"color": COLORS[k % len(COLORS)], "marker": MARKERS[k % len(MARKERS)]}
                axes.plot(places, ratios, label=size_text(size), **style)
            axes.set_title(label, loc="left")
            axes.set_xticks(range(len(counts)), [str(count) if count else "default" for count in counts], fontsize=8)
            axes.set_xlabel("blocks per rank")
        all_axes[0].set_ylabel("time over that of the fastest number")
        named = {line.get_label(): line for axes in all_axes for line in axes.get_lines()}
        texts = [size_text(size) for size in sizes]
        figure.legend([named[text] for text in texts], texts, loc="outside right upper")
        caption = f"Time over the number of thread blocks, beside the fastest number at each size; {place.title}."
        return finish(name, caption, figure, wide=True)


def _noise_plot(name: str, points: dict[str, tuple[float, float]], where: str) -> Plot:
    with styled(name):
        figure, (axes,) = figure_with_axes(6.4, 4.0)
        for k, (label, (x, y)) in enumerate(points.items()):
            axes.plot([x], [y], linestyle="none", color=COLORS[k % len(COLORS)], marker=MARKERS[k % len(MARKERS)])
            axes.annotate(label, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8, color=INK)
        axes.margins(x=0.25, y=0.12)
        axes.set_xlabel("bytes of the busiest rank, % of unquantized")
        axes.set_ylabel("signal over noise, dB")
        caption = f"Signal over quantization noise beside bytes, normally distributed partial sums, {where}."
        return finish(name, caption, figure)
