"""Mean square errors over layers (Flash Communication, arXiv 2412.04964, Fig. 5): by stage, and accumulated."""

from dataclasses import dataclass

import pandas as pd

from fc_eval.report.figure import COLORS, MARKERS, Plot, figure_with_axes, finish, styled
from fc_eval.report.groups import Group
from fc_eval.report.layers import MODES, with_layers

STAGES = {"reduce": "RS", "gather": "AG"}
LINES = ("-", (0, (4, 2)), (0, (1, 1.5)))


@dataclass(frozen=True)
class Line:
    """One line of a panel: its name, its place among colours and among line styles, MSE by layer."""

    name: str
    color: int
    style: int
    mse: "pd.Series[float]"


def layer_plots(group: Group) -> list[Plot]:
    """For each evaluation of layers: the error of each stage and format by kind of layer, and that of the outputs."""
    names = dict.fromkeys(name for name, *_ in with_layers(group))
    return [plot for name in names for plot in (_stage_plot(group, name), _output_plot(group, name)) if plot]


def _stage_plot(group: Group, name: str) -> Plot | None:
    """A panel per kind of layer, a line per stage and format; a format that several runs send is drawn once."""
    panels: dict[str, dict[tuple[str, str], pd.Series[float]]] = {}
    for _, _, pair, layers in (found for found in with_layers(group) if found[0] == name):
        arm = pair.record.arm
        if arm.policy != "uniform":
            continue  # its layers differ in format
        for stage, fmt in zip(STAGES, (arm.reduce_format, arm.gather_format), strict=True):
            rows = layers.table.query("mode == 'isolated' and part == @stage")
            for kind, own in rows.groupby("kind"):
                panels.setdefault(str(kind), {}).setdefault((stage, _short(fmt)), own.set_index("layer")["mse"])
    if not panels:
        return None
    formats = sorted({fmt for lines in panels.values() for _, fmt in lines})
    drawn = {
        kind: [
            Line(f"{STAGES[stage]} {fmt}", formats.index(fmt), list(STAGES).index(stage), mse)
            for (stage, fmt), mse in sorted(lines.items(), key=lambda item: (item[0][1], item[0][0] == "gather"))
        ]
        for kind, lines in panels.items()
    }
    caption = (
        "Mean square error of what is sent, by layer, isolated: before the reduce-scatter (RS, each rank's partial "
        f"sum) and before the all-gather (AG, the exact sum); {group.title}."
    )
    return _plot(f"layer_error_by_stage_{group.slug}_{name}", caption, drawn)


def _output_plot(group: Group, name: str) -> Plot | None:
    """A panel per mode, a line per run and kind of layer."""
    runs = [(label, layers) for found, label, _, layers in with_layers(group) if found == name]
    panels: dict[str, list[Line]] = {}
    for place, (label, layers) in enumerate(runs):
        rows = layers.table.query("part == 'output' and mse > 0")
        kinds = sorted(set(layers.table["kind"]), reverse=True)
        for (mode, kind), own in rows.groupby(["mode", "kind"]):
            line = Line(f"{label}, {kind}", place, kinds.index(kind), own.set_index("layer")["mse"])
            panels.setdefault(str(mode), []).append(line)
    if not panels:
        return None
    panels = {mode: sorted(panels[mode], key=lambda line: (line.color, line.style)) for mode in MODES if mode in panels}
    caption = (
        "Mean square error of the layers' outputs against the baseline's: isolated (each layer is given what the "
        f"baseline computes) and accumulated (the quantized model beside the baseline); {group.title}."
    )
    return _plot(f"layer_error_{group.slug}_{name}", caption, panels)


def _plot(plot_name: str, caption: str, panels: dict[str, list[Line]]) -> Plot:
    with styled(plot_name):
        figure, all_axes = figure_with_axes(9.6, 3.8, len(panels), share_y=True)
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            for line in lines:
                mse = line.mse[line.mse > 0]  # an exact layer has no place on a logarithmic axis
                axes.plot(
                    mse.index,
                    mse,
                    color=COLORS[line.color % len(COLORS)],
                    linestyle=LINES[line.style % len(LINES)],
                    marker=MARKERS[line.style % len(MARKERS)],
                    markersize=3,
                    label=line.name,
                )
            axes.set_yscale("log")
            axes.set_title(title, loc="left")
            axes.set_xlabel("layer")
        all_axes[0].set_ylabel("MSE")
        labels = list(dict.fromkeys(line.name for lines in panels.values() for line in lines))
        handles = [
            next(h for axes in all_axes for h, n in zip(*axes.get_legend_handles_labels(), strict=True) if n == label)
            for label in labels
        ]
        figure.legend(handles, labels, loc="outside right upper")
        return finish(plot_name, caption, figure, wide=True)


def _short(fmt: str | None) -> str:
    """'INT4 g128' of 'int4-g128-asym'."""
    base, *rest = (fmt or "").split("-")
    return " ".join([base.upper(), *(part for part in rest if part != "asym")])
