"""A model with the weights that its configuration asks for: loaded, smoothed over a calibration text, quantized.

    load_model -> smoothed -> [ the check that splitting changes nothing ] -> quantize_

The largest magnitudes of activations are kept in the cache, so that the runs of a sweep, and the ranks of a run, look
at the calibration text once.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.calibration import Sequences, calibration_sequences
from fc_eval.models.cache import locked
from fc_eval.models.config import ModelConfig
from fc_eval.models.half_products import half_products
from fc_eval.models.load import LoadedModel, load_model
from fc_eval.models.smoothed import needs_calibration, smoothed_before
from fc_eval.parallel.self_check import Otherwise, check_logits, rounding_bound, sensitivity
from fc_eval.parallel.sites import find_decoder
from fc_eval.results.fingerprint import cache_dir, files_digest, package_versions
from fc_eval.weights.folds import Fold, find_folds
from fc_eval.weights.linear import quantize_ as quantize_layers_
from fc_eval.weights.smooth import recording, smooth_


def load(config: ModelConfig, device: str = "cpu", data_root: str | Path | None = None) -> LoadedModel:
    """A model with the weights that `config.weights` says, ready to be evaluated.

    Args:
        config: where from, and how.
        device: as for `load_model`.
        data_root: folder that mirrors dataset ids, for the calibration text; None for the Hub.

    Raises:
        FcEvalError: as `load_model`, `smoothed` and `quantize_`.
    """
    loaded = smoothed(load_model(config.unquantized(), device), config, data_root)
    quantize_(loaded)
    return loaded


def quantize_(loaded: LoadedModel) -> None:
    """Gives a model that `smoothed` returned the weights that its configuration asks for, in place.

    Raises:
        FcEvalError: a linear layer that cannot be quantized.
    """
    if loaded.config.weights == "w8a8":
        quantize_layers_(find_decoder(loaded.model))


def smoothed(
    loaded: LoadedModel, config: ModelConfig, data_root: str | Path | None = None, on: str | None = None
) -> LoadedModel:
    """The model of a configuration before it is quantized: smoothed in place, where weights=w8a8 asks for it.

    Args:
        loaded: the checkpoint's own weights.
        config: its configuration with the weights that are wanted.
        data_root: folder that mirrors dataset ids, for the calibration text; None for the Hub.
        on: the device that the model is moved to for the calibration text; None leaves it where it is.

    Returns:
        The same model with `config`, and notes on how it was smoothed.

    Raises:
        FcEvalError: no calibration text, no place to fold into, or a model that smoothing would change.
    """
    if config.weights == "native":
        before = smoothed_before(config)
        notes = [] if before is None else [f"smoothed with {before['alpha']:g}, which changes it by rounding only"]
        return replace(loaded, config=config, notes=(*loaded.notes, *notes))
    if not needs_calibration(config):
        return replace(loaded, config=config, notes=(*loaded.notes, config.weights_label))
    origin = smooth_over_text_(loaded, config, data_root, on)
    note = f"{config.weights_label}, calibrated on {calibration_text(origin)}"
    return replace(loaded, config=config, notes=(*loaded.notes, note))


def calibration_text(origin: Mapping[str, Any]) -> str:
    """'Salesforce/wikitext (train), 512 sequences of 512 tokens, token ids 0123abcd...' of a calibration's origin."""
    split = f" ({origin['split']})" if origin.get("split") else ""
    return (
        f"{origin['dataset']}{split}, {origin['sequences']} sequences of {origin['tokens']} tokens, "
        f"token ids {origin['token_ids_sha256'][:12]}"
    )


def smooth_over_text_(
    loaded: LoadedModel, config: ModelConfig, data_root: str | Path | None = None, on: str | None = None
) -> dict[str, Any]:
    """Smooths a model in place over the calibration text of `config`, and makes sure that it computes the same.

    Returns:
        Where the text came from, with the SHA-256 of its token ids.

    Raises:
        FcEvalError: as `smoothed`.
    """
    assert config.smoothing is not None  # needs_calibration has made sure
    model, spec = loaded.model, config.calibration
    if any(parameter.is_meta for parameter in model.parameters()):
        raise FcEvalError(
            "weights=w8a8 needs the whole model in memory, but a part of it is offloaded: leave out model.device_map, "
            "or give it enough GPUs"
        )
    root = Path(data_root) if data_root is not None else None
    text = calibration_sequences(spec.text, spec.sequences, spec.tokens, loaded.tokenizer, root, config.add_bos_token)
    if on is not None:
        model.to(on)
    decoder = find_decoder(model)
    with half_products(model):
        folds = find_folds(decoder, lambda: check_logits(model))
        activations = _activations(replace(loaded, config=config), decoder, folds, text)
        before_TV = check_logits(model)
        with Otherwise().in_outputs(decoder, [name for fold in folds for name in fold.linears]):
            bound = rounding_bound(sensitivity(model))
        smooth_(decoder, folds, activations, config.smoothing)
        _check_unchanged(before_TV, check_logits(model), bound)
    return text.origin


def _activations(
    loaded: LoadedModel, decoder: nn.Module, folds: tuple[Fold, ...], text: Sequences
) -> dict[str, torch.Tensor]:
    """The largest magnitude of each channel that the norms give over a text, fp32 [K] by the norms' names."""
    file = cache_dir() / "activations" / f"{_key(loaded, text)}.safetensors"
    with locked(file):
        if file.is_file():
            try:
                return dict(safetensors.torch.load_file(file))
            except SafetensorError:  # a disk has lost a part of it: made again
                file.unlink()
        said = f"{text.origin['sequences']} sequences of {text.origin['tokens']} tokens"
        print(f"smoothing: the model reads {said} once", flush=True)
        started = time.time()
        with recording(decoder, folds) as largest, torch.inference_mode():
            for ids in text.ids:
                decoder(input_ids=torch.from_numpy(ids)[None].to(loaded.device), use_cache=False)
        print(f"smoothing: {said} read, {time.time() - started:.0f} s", flush=True)
        found = {name: values.cpu() for name, values in largest.items()}
        part = file.with_suffix(".part")
        safetensors.torch.save_file(found, part)
        part.replace(file)
    return found


def _key(loaded: LoadedModel, text: Sequences) -> str:
    """A hash of all that decides the activations of a model over a text."""
    model = loaded.config.identity()
    for key in ("weights", "smoothing", "calibration", "name"):
        model.pop(key, None)
    on_cpu = loaded.device.type == "cpu"
    facts = {
        "model": model,
        "files": files_digest(loaded.source_files),
        "settings": loaded.model.config.to_diff_dict(),
        "token ids": text.origin["token_ids_sha256"],
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(loaded.device),
        "threads": torch.get_num_threads() if on_cpu else None,  # the order of sums follows them
        "versions": package_versions(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _check_unchanged(before_TV: torch.Tensor, after_TV: torch.Tensor, bound: float) -> None:
    """Makes sure that folding has changed logits by no more than rounding the smoothed weights can explain.

    Each weight of a fold is rounded once more, by at most a unit roundoff of its own, so products are off by no more
    than the bound assumes. A norm whose output goes elsewhere, too, is off by the order of the signal.
    """
    error = float((after_TV - before_TV).norm() / before_TV.norm())
    if not error <= bound or not math.isfinite(error):
        raise FcEvalError(
            f"smoothing changes what the model computes (logits differ by {error:.2e}, bound {bound:.2e}): a norm's "
            "output is used elsewhere as well; use model.smoothing=null, which quantizes without smoothing"
        )
