"""A model in memory as lm-eval sees it: explicit BOS, log-likelihoods in fp32, batches shared by several processes."""

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.continuations import score_continuations
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Progress, Ticker
from fc_eval.evaluate.windows import bos_id, encode

# lm-eval's own default seeds; they decide which few-shot examples are drawn.
SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}


class ScoringLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """`HFLM` with explicit BOS and log-likelihoods in fp32.

    `HFLM` takes the log-softmax in the model's dtype: in bf16 a log-likelihood of -50 then has steps of 0.25, more
    than most of the effects that are measured here.

    With several processes each of them is asked all requests and gives all answers, but computes only its share of the
    batches. lm-eval believes that it is alone: its own data parallelism would form other batches, and so other numbers.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        add_bos_token: bool,
        progress: Progress | None = None,
        processes: Processes = ALONE,
        **kwargs: Any,
    ) -> None:
        self._progress, self._processes = progress, processes
        self.request_ids: list[list[int]] = []
        self.truncated = 0
        super().__init__(pretrained=pretrained, add_bos_token=add_bos_token, **kwargs)
        bos_id(self.tokenizer, add_bos_token)
        if not isinstance(self.batch_size, int):
            raise FcEvalError(f"batch_size={self.batch_size!r} is not a whole number: it must be the same in all runs")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Token ids with one BOS in front, or none; the tokenizer's own default has no say."""
        ids = encode(self.tokenizer, string, self.add_bos_token if add_special_tokens is None else add_special_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-padded token ids [B, T] int64 and their attention mask, encoded as `tok_encode` does."""
        rows = [self.tok_encode(string, left_truncate_len=left_truncate_len) for string in strings]
        width = max(map(len, rows))
        ids = torch.tensor([[self.tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids, mask

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation, and whether greedy decoding would give it."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole documents, each by one process."""
        ticker = Ticker(self._progress, len(requests), self._processes.count)
        earlier, rolling = self.request_ids, super().loglikelihood_rolling

        def score(request: Any) -> tuple[float, list[list[int]]]:
            self.request_ids = []
            (logprob,) = rolling([request], disable_tqdm=True)
            ticker.advance(1)
            return logprob, self.request_ids

        found = self._processes.map(score, requests)
        ticker.finish()
        self.request_ids = earlier + [window for _, windows in found for window in windows]
        return [logprob for logprob, _ in found]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Scores (text, context ids, continuation ids) in fp32."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        self.request_ids += [context + continuation for context, continuation in pairs]
        self.truncated += sum(len(ids) - 1 > self.max_length for ids in self.request_ids[-len(pairs) :])
        # The text is None for windows of one long document: those run one at a time, and the caller counts and shares.
        rolling = requests[0][0] is None
        processes = ALONE if rolling else self._processes
        return score_continuations(
            self.model,
            pairs,
            batch_size=1 if rolling else self.batch_size,
            max_tokens=self.max_length,
            ticker=Ticker(None if rolling else self._progress, len(pairs), processes.count),
            processes=processes,
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generated text of each request.

        Batches are those that lm-eval forms by itself. Sampling starts from a seed of the batch, so that it does not
        matter which process runs it, and after which others.
        """
        self.request_ids += [self.tok_encode(request.args[0]) for request in requests]
        self._ticker = Ticker(self._progress, len(requests), self._processes.count)
        order = Collator(
            requests,
            sort_fn=lambda request: (-len(self.tok_encode(request.args[0])), request.args[0]),
            group_by="gen_kwargs",
            group_fn=lambda request: request.args[1],
        )
        generate = super().generate_until

        def texts_of(numbered: tuple[int, list[Any]]) -> list[str]:
            index, batch = numbered
            torch.manual_seed(SEEDS["torch"] + index)
            texts: list[str] = generate(batch, disable_tqdm=True)
            return texts

        batches = self._processes.map(texts_of, list(enumerate(order.get_batched(n=self.batch_size))))
        self._ticker.finish()
        texts: list[str] = order.get_original([text for batch in batches for text in batch])
        return texts

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids: torch.Tensor = super()._model_generate(context, *args, **kwargs)
        self._ticker.advance(len(context))
        return ids
