"""Perplexity: fp32 cross-entropy over `window - 1` positions of each window, exp of the mean over all tokens.

B windows, T positions, V vocabulary. Logits stay in the model's dtype; only a chunk of positions at a time is widened
to fp32, and of a long window only a part has logits at a time; so memory grows neither with the text nor, beyond the
model's own, with T * V.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from fc_eval.evaluate.logits import input_device, logits_parts, targets
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Progress, Ticker
from fc_eval.evaluate.windows import Windows

# Elements of an fp32 chunk. On a CPU 4 MB stay in the cache and below the size from which malloc asks the kernel for
# fresh pages (three times slower, measured); a GPU wants fewer and larger launches.
CPU_CHUNK, GPU_CHUNK = 2**20, 2**24


@dataclass(frozen=True)
class Losses:
    """What each window lost: `nll_sum` float64 [n] in nats, `tokens` int64 [n] predicted positions."""

    nll_sum: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]

    def metrics(self) -> dict[str, float | int]:
        """`perplexity`, `nll` (mean per token), `tokens`, `windows`."""
        tokens = int(self.tokens.sum())
        nll = float(self.nll_sum.sum() / tokens)
        with np.errstate(over="ignore"):  # a broken model has a perplexity of inf, which is an answer
            perplexity = float(np.exp(nll))
        return {"perplexity": perplexity, "nll": nll, "tokens": tokens, "windows": len(self.tokens)}


def window_batches(windows: Windows, batch: int) -> list[torch.Tensor]:
    """Token ids [B, T] int64 on the CPU, `batch` windows at a time."""
    return [torch.from_numpy(windows.ids[start : start + batch]) for start in range(0, len(windows.ids), batch)]


def chunks(logits_TV: torch.Tensor) -> Iterator[slice]:
    """Consecutive slices of positions, each of about one fp32 chunk of logits."""
    (positions, vocabulary), device = logits_TV.shape, logits_TV.device
    rows = max(1, (CPU_CHUNK if device.type == "cpu" else GPU_CHUNK) // vocabulary)
    for start in range(0, positions, rows):
        yield slice(start, min(start + rows, positions))


def token_nll(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood [T] fp32 of each target under logits [T, V] of any dtype."""
    parts = [
        functional.cross_entropy(logits_TV[part].float(), targets_T[part], reduction="none")
        for part in chunks(logits_TV)
    ]
    return torch.cat(parts)


def total(nll: list[float]) -> float:
    """Sum in nats, rounded once; torch's own sum depends on how many CPU threads share it."""
    return math.fsum(nll)


def is_greedy(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Whether each target is the first choice, bool [T], under logits [T, V] of any dtype."""
    # `max` in fp32 is several times faster on a CPU than `argmax`, and than either in bf16.
    return torch.cat([logits_TV[part].float().max(-1).indices == targets_T[part] for part in chunks(logits_TV)])


def window_losses(
    model: Any,
    windows: Windows,
    *,
    window_batch: int = 1,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Losses:
    """Runs the model over all windows.

    Args:
        model: a causal language model of transformers; called with `input_ids` [B, T] and `use_cache=False`.
        windows: what to predict.
        window_batch: B, windows per forward pass.
        progress: called after each batch.
        processes: those that share the batches.
    """
    device = input_device(model)
    ticker = Ticker(progress, len(windows.ids), processes.count)

    @torch.inference_mode()
    def losses_of(ids_BT: torch.Tensor) -> list[float]:
        nll: list[list[float]] = [[] for _ in ids_BT]
        for part, logits_BTV in logits_parts(model, ids_BT.to(device)):
            for window, logits_TV, targets_T in zip(nll, logits_BTV, targets(ids_BT, part, logits_BTV), strict=True):
                window += token_nll(logits_TV[: len(targets_T)], targets_T).tolist()
        ticker.advance(len(ids_BT))
        return [total(window) for window in nll]

    batches = processes.map(losses_of, window_batches(windows, window_batch))
    ticker.finish()
    sums = [loss for batch in batches for loss in batch]
    return Losses(np.array(sums), np.full(len(sums), windows.ids.shape[1] - 1))
