"""Layer errors as tables: by kind of layer and part of the all-reduce, and layer by layer."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fc_eval.report.groups import Group
from fc_eval.report.tables import Cell, Column, Table
from fc_eval.results.compare import Paired
from fc_eval.results.layers import Layers
from fc_eval.results.record import RunRecord
from fc_eval.results.text import MISSING, number

if TYPE_CHECKING:
    import pandas as pd

# Words for what a part is; the order is that in which an all-reduce meets them.
PARTS = {
    "reduce": "before reduce-scatter",
    "gather": "before all-gather",
    "reduce_only": "output, reduce quantized alone",
    "gather_only": "output, gather quantized alone",
    "output": "output",
}
MODES = ("isolated", "accumulated")


def with_layers(group: Group) -> Iterator[tuple[str, str, Paired, Layers]]:
    """Evaluation, label, run and layers of every quantized run of a group that measured them."""
    for name in dict.fromkeys(name for pair in group.pairs for name in pair.record.layers):
        for label, pair in zip(group.labels, group.pairs, strict=True):
            layers = pair.record.layers.get(name)
            if layers is not None and not pair.record.is_baseline:
                yield name, label, pair, layers


def layer_tables(group: Group) -> list[tuple[str, Table]]:
    """One table per run: what each part loses, over all layers of a kind."""
    return [
        (f"{name}: {label}, over all layers, {_windows(pair, name)}", _summary_table(layers))
        for name, label, pair, layers in with_layers(group)
    ]


def by_layer_tables(group: Group) -> list[tuple[str, Table]]:
    """One table per run: SQNR in dB of each layer, a column per kind, mode and part."""
    return [
        (f"{name}: {label}, SQNR in dB by layer, {_windows(pair, name)}", _by_layer_table(layers))
        for name, label, pair, layers in with_layers(group)
    ]


def layers_frame(records: Sequence[RunRecord]) -> "pd.DataFrame | None":
    """The rows of all runs, each with its run and its evaluation in front; None where there are none."""
    import pandas as pd

    frames = []
    for record in records:
        for name, layers in record.layers.items():
            arm, frame = record.arm, layers.table.copy()
            said: dict[str, Any] = {key: getattr(arm, key) for key in ("model", "tp", "label", "policy")}
            said |= {"eval": name, "fingerprint": record.fingerprint}
            frames.append(frame.assign(**said)[[*said, *layers.table.columns]])
    return pd.concat(frames, ignore_index=True) if frames else None


def _windows(pair: Paired, name: str) -> str:
    info, protocol = pair.record.evals[name], pair.record.protocol.get(name, {})
    return f"{info.label}, {info.samples} x {protocol.get('window_tokens', '?')} tokens"


def _summary_table(layers: Layers) -> Table:
    columns = [Column("layers", words=True), Column("mode", words=True), Column("error of", words=True)]
    columns += [Column(title) for title in ("MSE", "relative error", "SQNR, dB", "lowest cosine")]
    columns += [Column(title, "share, %") for title in ("saturated codes", "saturated groups", "zero-range groups")]
    rows = []
    for entry in layers.summary().to_dict("records"):
        cells = [Cell(str(entry["kind"])), Cell(str(entry["mode"])), Cell(PARTS[str(entry["part"])])]
        cells += [_scientific(entry["mse"]), _scientific(entry["relative_error"])]
        cells += [_decibel(entry["sqnr_db"]), Cell(number(entry["cosine"], 6), entry["cosine"])]
        cells += [_share(entry[key]) for key in ("saturated_codes", "saturated_groups", "zero_range_groups")]
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows))


def _by_layer_table(layers: Layers) -> Table:
    table = layers.table
    keys = list(dict.fromkeys(zip(table["kind"], table["mode"], table["part"], strict=True)))
    keys.sort(key=lambda key: (key[0], MODES.index(key[1]), list(PARTS).index(key[2])))
    columns = [Column("layer"), *(Column(f"{mode}, {PARTS[part]}", kind) for kind, mode, part in keys)]
    values = {(row["layer"], row["kind"], row["mode"], row["part"]): row["sqnr_db"] for row in table.to_dict("records")}
    rows = []
    for layer in sorted({row for row in table["layer"] if row == row}):
        found = [_decibel(values.get((layer, *key), math.nan)) for key in keys]
        rows.append((Cell(f"{layer:.0f}", layer), *found))
    return Table(tuple(columns), tuple(rows))


def _scientific(value: float) -> Cell:
    return Cell("0" if value == 0 else MISSING if math.isnan(value) else f"{value:.3g}", value)


def _decibel(value: float) -> Cell:
    return Cell("exact" if value == math.inf else number(value, 2), value)


def _share(value: float) -> Cell:
    return Cell("" if math.isnan(value) else number(100 * value, 3), value)
