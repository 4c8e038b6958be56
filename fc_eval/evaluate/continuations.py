"""Log-likelihoods of continuations given contexts: what multiple-choice tasks ask of a model.

Only the positions that are scored pass through the LM head, and log-likelihoods are fp32 whatever the model's dtype.
B rows of a batch, T positions, K positions kept, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from fc_eval.evaluate.logits import input_device
from fc_eval.evaluate.perplexity import is_greedy, token_nll, total
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Ticker


def score_continuations(
    model: Any,
    requests: Sequence[tuple[list[int], list[int]]],
    *,
    batch_size: int,
    max_tokens: int,
    ticker: Ticker,
    processes: Processes = ALONE,
) -> list[tuple[float, bool]]:
    """Scores each (context ids, continuation ids), both at least one token.

    Requests run longest first in batches padded on the right (causal attention never looks there). Requests whose
    input is the same, such as one-token choices after one context, share one row.

    Args:
        model: a causal language model of transformers.
        requests: contexts and continuations.
        batch_size: rows per forward pass.
        max_tokens: longest input; a longer one loses its beginning.
        ticker: counts requests.
        processes: those that share the batches.

    Returns:
        For each request the log-likelihood of its continuation in nats, and whether greedy decoding would give it.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        rows.setdefault(tuple((context + continuation)[-(max_tokens + 1) : -1]), []).append(index)
    order = sorted(rows, key=lambda ids: (-len(ids), ids))
    device, cuts_head = input_device(model), "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def scores_of(batch: list[tuple[int, ...]]) -> dict[int, tuple[float, bool]]:
        width = len(batch[0])
        scored = {ids: max(len(requests[index][1]) for index in rows[ids]) for ids in batch}
        keep = max(width - len(ids) + scored[ids] for ids in batch)
        ids_BT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in batch], device=device)
        extra = {"logits_to_keep": keep} if cuts_head else {}
        logits_BKV = model(input_ids=ids_BT, use_cache=False, **extra).logits[:, -keep:]
        # All scored positions of the batch at once: asking a GPU for one request after another took longer than the
        # forward pass.
        asked = [(row, len(ids), index) for row, ids in enumerate(batch) for index in rows[ids]]
        places = [
            (row, keep - width + length - back, target)
            for row, length, index in asked
            for back, target in zip(range(len(requests[index][1]), 0, -1), requests[index][1], strict=True)
        ]
        row_N, position_N, targets_N = torch.tensor(places, device=logits_BKV.device).unbind(1)
        scores_NV = logits_BKV[row_N, position_N]
        nll, greedy = token_nll(scores_NV, targets_N).tolist(), is_greedy(scores_NV, targets_N).tolist()
        found, start = {}, 0
        for _row, _length, index in asked:
            tokens = slice(start, start := start + len(requests[index][1]))
            found[index] = (-total(nll[tokens]), all(greedy[tokens]))
        ticker.advance(len(found))
        return found

    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    answers = {index: answer for found in processes.map(scores_of, batches) for index, answer in found.items()}
    ticker.finish()
    return [answers[index] for index in range(len(requests))]
