"""What quantization does to the output of each layer, in sums that do not grow with the text.

isolated      every layer is given what the baseline computes; what the quantized all-reduce makes of it is measured
              and thrown away, and the model goes on as the baseline (Flash Communication, arXiv 2412.04964, Fig. 5)
accumulated   the quantized model's layers beside the baseline's at the same positions: what was lost before counts too

This file knows layers by name and pairs of tensors. A `Probe` lets the model run and hands over the pairs; who made
them, and how, is none of its business. Of a batch of windows the baseline's outputs stay in memory, in the model's
dtype, until the other passes are done.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fc_eval.evaluate.logits import input_device, without_logits
from fc_eval.evaluate.perplexity import window_batches
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Progress, Ticker
from fc_eval.evaluate.windows import Windows

# Elements that are widened to fp64 at a time: 8 MB each of what was sent, of what arrived, and of their difference.
CHUNK = 2**20
OUTPUT = "output"
# What is counted in groups where something was encoded; the last one is how many groups there were.
COUNTS = ("saturated_codes", "saturated_groups", "zero_range_groups", "nonfinite_groups", "groups")

# (layer, part, exact, found, counts): tensors of one shape, and an int64 [len(COUNTS)] where groups were encoded.
Observe = Callable[[str, str, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
# (layer, its output).
ObserveOutput = Callable[[str, torch.Tensor], None]


class Probe(Protocol):
    """Runs the model in ways in which its layers can be watched."""

    @property
    def layers(self) -> Sequence[Mapping[str, Any]]:
        """What is known of each layer: its name under `site`, and whatever else shall stand in the results."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What cannot be measured here, in words."""
        ...

    def isolated(self, observe: Observe) -> AbstractContextManager[None]:
        """A context in which the model is the baseline; `observe` gets every part of every layer, `OUTPUT` among them:
        the baseline's output, and what the quantized all-reduce makes of the same input."""
        ...

    def accumulated(self, stages: bool) -> Mapping[str, Callable[[ObserveOutput], AbstractContextManager[None]]]:
        """By part, a context in which the model is quantized; `OUTPUT` is the model as it is, and with `stages` there
        is one more for each stage that quantizes alone."""
        ...


@dataclass(frozen=True)
class LayerErrors:
    """Layers x modes x parts as rows, and what was seen.

    Attributes:
        rows: JSON-ready; energies are means over elements. `sqnr_db` is infinite where nothing was lost.
        windows: how many there were.
    """

    rows: tuple[dict[str, Any], ...]
    windows: int

    def metrics(self) -> dict[str, float | int]:
        """By kind of layer, mode and part: `mse` and `relative_error` over all elements of all such layers."""
        found: dict[str, float | int] = {"windows": self.windows}
        for key in dict.fromkeys((row["kind"], row["mode"], row["part"]) for row in self.rows):
            rows = [row for row in self.rows if (row["kind"], row["mode"], row["part"]) == key]
            elements = sum(row["elements"] for row in rows)
            error = math.fsum(row["mse"] * row["elements"] for row in rows)
            signal = math.fsum(row["signal_power"] * row["elements"] for row in rows)
            name = " ".join(key)
            found[f"{name} mse"] = error / elements
            found[f"{name} relative_error"] = _root_of_ratio(error, signal)
        return found


def moments(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Sums over two tensors of one shape, fp64 [5]: elements, exact^2, found^2, exact * found, (exact - found)^2."""
    sums = torch.zeros(4, dtype=torch.float64, device=exact.device)
    exact_n, found_n = exact.reshape(-1), found.reshape(-1)
    for start in range(0, exact.numel(), CHUNK):
        x, y = (values[start : start + CHUNK].double() for values in (exact_n, found_n))
        e = x - y
        sums += torch.stack([x.dot(x), y.dot(y), x.dot(y), e.dot(e)])
    return torch.cat([sums.new_tensor([exact.numel()]), sums])


# By (layer, mode, part): the moments, then the counts, fp64 [5 + len(COUNTS)]; counts are exact below 2^53.
Sums = dict[tuple[str, str, str], torch.Tensor]


def layer_errors(
    model: Any,
    windows: Windows,
    probe: Probe,
    *,
    stages: bool = True,
    window_batch: int = 1,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> LayerErrors:
    """Runs the model over all windows: once as the baseline, once as it is, and once for each stage alone.

    Args:
        model: a causal language model of transformers.
        windows: what it reads.
        probe: watches its layers.
        stages: whether each stage also quantizes alone.
        window_batch: windows per forward pass.
        progress: called after each batch.
        processes: those that share the batches.
    """
    device = input_device(model)
    ticker = Ticker(progress, len(windows.ids), processes.count)

    @torch.inference_mode()
    def sums_of(ids_BT: torch.Tensor) -> dict[tuple[str, str, str], list[float]]:
        sums: Sums = {}
        outputs: dict[str, torch.Tensor] = {}

        def isolated(layer: str, part: str, exact: torch.Tensor, found: torch.Tensor, counts: Any) -> None:
            _add(sums, (layer, "isolated", part), exact, found, counts)
            if part == OUTPUT:
                outputs[layer] = exact

        with probe.isolated(isolated):
            without_logits(model, ids_BT.to(device))
        for part, watched in probe.accumulated(stages).items():

            def accumulated(layer: str, found: torch.Tensor, part: str = part) -> None:
                _add(sums, (layer, "accumulated", part), outputs[layer], found, None)

            with watched(accumulated):
                without_logits(model, ids_BT.to(device))
        ticker.advance(len(ids_BT))
        return {key: values.tolist() for key, values in sums.items()}

    batches = processes.map(sums_of, window_batches(windows, window_batch))
    ticker.finish()
    # Rounded once, so that neither the order of the batches nor who computed them matters.
    sums = {key: [math.fsum(column) for column in zip(*(b[key] for b in batches), strict=True)] for key in batches[0]}
    layers = {str(layer["site"]): layer for layer in probe.layers}
    rows = [_row(layers[site], mode, part, values) for (site, mode, part), values in sums.items()]
    order = {site: place for place, site in enumerate(layers)}
    rows.sort(key=lambda row: order[row["site"]])  # stable: modes and parts stay in the order in which they came
    return LayerErrors(tuple(rows), len(windows.ids))


def _add(sums: Sums, key: tuple[str, str, str], exact: torch.Tensor, found: torch.Tensor, counts: Any) -> None:
    values = moments(exact, found)
    counted = values.new_zeros(len(COUNTS)) if counts is None else counts.to(values)
    values = torch.cat([values, counted])
    sums[key] = sums[key] + values if key in sums else values


def _row(layer: Mapping[str, Any], mode: str, part: str, sums: Sequence[float]) -> dict[str, Any]:
    """One row of the results; shares of groups are None where nothing was encoded."""
    elements, exact, found, both, error = sums[:5]
    counts = dict(zip(COUNTS, sums[5:], strict=True))
    groups = counts.pop("groups")
    nonfinite = counts.pop("nonfinite_groups")
    of = {"saturated_codes": elements, "saturated_groups": groups, "zero_range_groups": groups}
    size = math.sqrt(exact * found)  # at most 1e160, for squares of the largest bf16 values
    return {
        **layer,
        "mode": mode,
        "part": part,
        "elements": int(elements),
        "signal_power": exact / elements,
        "mse": error / elements,
        "relative_error": _root_of_ratio(error, exact),
        "sqnr_db": _decibel(exact, error),
        "cosine": both / size if size else math.nan,
        **{name: count / of[name] if groups else None for name, count in counts.items()},
        "nonfinite_groups": int(nonfinite),
    }


def _root_of_ratio(error: float, signal: float) -> float:
    """||error|| / ||signal||; 0 where nothing was lost, be there a signal or not."""
    if error == 0:
        return 0.0
    return math.sqrt(error / signal) if signal else math.inf


def _decibel(signal: float, error: float) -> float:
    """10 log10(signal / error): +inf where nothing was lost, -inf where there was nothing to lose."""
    if error == 0:
        return math.inf
    ratio = signal / error
    return 10 * math.log10(ratio) if ratio > 0 else (-math.inf if ratio == 0 else math.nan)
