"""Layer errors with known numbers, added to run folders made by `run_fixtures`."""

import json
from collections.abc import Callable
from pathlib import Path

from run_fixtures import HIDDEN

from fc_eval.evaluate.layer_error import LayerErrors, _row
from fc_eval.results.layers import layers_csv, read_layers

KINDS = {"o_proj": "self_attn.o_proj", "down_proj": "mlp.down_proj"}
PARTS = (
    *(("isolated", part) for part in ("reduce", "reduce_only", "gather", "output")),
    *(("accumulated", part) for part in ("output", "reduce_only", "gather_only")),
)
ELEMENTS = 1000.0


def rows(comm: str, mse: Callable[[str, int, str, str], float], layers: int = 3) -> list[dict]:
    """Rows of a model of so many layers; `mse` takes kind, layer, mode and part, and every signal has power 1."""
    found = []
    for layer in range(layers):
        for kind, name in KINDS.items():
            known = {"site": f"model.layers.{layer}.{name}", "kind": kind, "layer": layer, "hidden": HIDDEN}
            for mode, part in PARTS:
                error = mse(kind, layer, mode, part) * ELEMENTS
                counts = [5.0, 2.0, 1.0, 0.0, 10.0] if part in ("reduce", "gather") else [0.0] * 5
                sums = [ELEMENTS, ELEMENTS, ELEMENTS, ELEMENTS - error / 2, error, *counts]
                found.append(_row(known | {"comm": comm}, mode, part, sums))
    return found


def add_layers(path: Path, comm: str, mse: Callable[[str, int, str, str], float], name: str = "layer_error") -> Path:
    """Adds an evaluation of layer errors to a finished run folder."""
    entries = rows(comm, mse)
    (path / f"layers_{name}.csv").write_bytes(layers_csv(entries))
    result = json.loads((path / "result.json").read_text())
    metrics = LayerErrors(tuple(entries), 2).metrics()
    result["results"][name] = metrics
    result["evals"][name] = {"kind": "layer_error", "label": "wikitext2", "samples": 2, "partial": True}
    result["protocol"][name] = {"protocol": "wikitext2", "window_tokens": 512}
    (path / "result.json").write_text(json.dumps(result))
    assert len(read_layers(path, name).table) == len(entries)
    return path
