"""How far a model's predictions move from a baseline's: KL divergence and top-1 agreement, token by token.

Each window is run twice, once as the model is and once inside `as_baseline()`, so no logits are ever stored; the
first run also gives the losses, so perplexity and divergence share it. T positions, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from fc_eval.evaluate.logits import input_device, logits_parts, targets
from fc_eval.evaluate.perplexity import Losses, chunks, total, window_batches
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Progress, Ticker
from fc_eval.evaluate.windows import Windows

# Makes a context in which the same model computes as the baseline does.
AsBaseline = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Divergences:
    """Losses of the model, and its divergence from the baseline.

    Attributes:
        losses: as `window_losses`, of the model as it is.
        kl: float32 [n, T], KL(baseline || model) of each predicted position in nats.
        same_top1: bool [n, T], whether both put the same token first.
    """

    losses: Losses
    kl: npt.NDArray[np.float32]
    same_top1: npt.NDArray[np.bool_]

    def metrics(self) -> dict[str, float | int]:
        """Metrics of the losses, and `kl_mean`, `kl_p95`, `kl_max`, `same_top1` over all tokens."""
        return {
            **self.losses.metrics(),
            "kl_mean": float(self.kl.mean(dtype=np.float64)),
            "kl_p95": float(np.percentile(self.kl, 95)),
            "kl_max": float(self.kl.max()),
            "same_top1": float(self.same_top1.mean()),
        }


def token_divergence(
    logits_TV: torch.Tensor, baseline_TV: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compares two sets of logits [T, V] of any dtype, in fp32.

    Returns:
        Negative log-likelihood [T] of the model and KL(baseline || model) [T], both fp32 and in nats; same top-1 [T]
        bool. Equal logits give a KL of exactly 0; where rounding would make it negative it is 0 too.
    """
    parts = []
    for part in chunks(logits_TV):
        model, base = logits_TV[part].float(), baseline_TV[part].float()
        same = model.max(-1).indices == base.max(-1).indices
        model, base = functional.log_softmax(model, -1), functional.log_softmax(base, -1)
        nll = -model.gather(1, targets_T[part, None])[:, 0]
        kl = (base.exp() * (base - model)).sum(-1).clamp_min(0.0)
        parts.append((nll, kl, same))
    nll, kl, same = (torch.cat(column) for column in zip(*parts, strict=True))
    return nll, kl, same


def window_divergences(
    model: Any,
    windows: Windows,
    as_baseline: AsBaseline,
    *,
    window_batch: int = 1,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Divergences:
    """Runs the model over all windows, each once as it is and once as the baseline.

    Args:
        model: a causal language model of transformers.
        windows: what to predict.
        as_baseline: makes a context in which `model` computes as the baseline.
        window_batch: windows per forward pass.
        progress: called after each batch.
        processes: those that share the batches.
    """
    device = input_device(model)
    ticker = Ticker(progress, len(windows.ids), processes.count)

    @torch.inference_mode()
    def compared(ids_BT: torch.Tensor) -> list[tuple[float, npt.NDArray[np.float32], npt.NDArray[np.bool_]]]:
        own = logits_parts(model, ids_BT.to(device))
        with as_baseline():
            baseline = logits_parts(model, ids_BT.to(device))
        found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in ids_BT]
        for (part, logits_BTV), (_, baseline_BTV) in zip(own, baseline, strict=True):
            rows = zip(found, logits_BTV, baseline_BTV, targets(ids_BT, part, logits_BTV), strict=True)
            for window, logits_TV, baseline_TV, targets_T in rows:
                n = len(targets_T)
                window.append(tuple(x.cpu() for x in token_divergence(logits_TV[:n], baseline_TV[:n], targets_T)))
        ticker.advance(len(ids_BT))
        columns = [[torch.cat(parts) for parts in zip(*window, strict=True)] for window in found]
        return [(total(nll.tolist()), kl.numpy(), same.numpy()) for nll, kl, same in columns]

    batches = processes.map(compared, window_batches(windows, window_batch))
    ticker.finish()
    sums, kls, sames = zip(*(window for batch in batches for window in batch), strict=True)
    tokens = np.full(len(sums), windows.ids.shape[1] - 1)
    return Divergences(Losses(np.array(sums), tokens), np.stack(kls), np.stack(sames))
