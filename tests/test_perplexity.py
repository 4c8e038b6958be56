"""Losses and perplexity against fp64, and the whole way from a configuration to a result."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fc_eval.errors import FcEvalError
from fc_eval.evaluate import perplexity
from fc_eval.evaluate.perplexity import is_greedy, token_nll, window_losses
from fc_eval.evaluate.run import evaluate
from fc_eval.evaluate.spec import PerplexitySpec
from fc_eval.evaluate.windows import Windows, build_windows
from fc_eval.models.tiny import byte_tokenizer


class Fixed(torch.nn.Module):
    """A model whose logits depend on the input token alone: row `token` of a table [V, V]."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.calls = []
        self.config = SimpleNamespace(max_position_embeddings=None)

    def forward(self, input_ids, use_cache):
        self.calls.append((tuple(input_ids.shape), use_cache, torch.is_inference_mode_enabled()))
        return SimpleNamespace(logits=self.table[input_ids])


def some_windows(n=5, window=33, vocabulary=50, seed=0):
    ids = np.random.default_rng(seed).integers(0, vocabulary, (n, window))
    return Windows(ids, np.arange(n), True, {})


def fp64_nll(table, ids):
    logprobs = torch.log_softmax(table.double(), -1)
    return np.array([[-float(logprobs[a, b]) for a, b in itertools.pairwise(row)] for row in ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_are_fp32_cross_entropy_of_the_models_logits(dtype):
    table = (8 * torch.randn(50, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    found, data = window_losses(Fixed(table), some_windows()), some_windows()
    expected = fp64_nll(table, data.ids)
    # 32 terms of about 10 with fp32 rounding: relative error of some 2^-24.
    np.testing.assert_allclose(found.nll_sum, expected.sum(1), rtol=1e-6)  # see above: fp32 against fp64
    assert found.tokens.tolist() == [32] * 5
    metrics = found.metrics()
    assert metrics["nll"] == found.nll_sum.sum() / 160
    assert metrics["perplexity"] == math.exp(metrics["nll"])
    assert (metrics["tokens"], metrics["windows"]) == (160, 5)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    metrics = window_losses(Fixed(torch.zeros(64, 64)), some_windows(vocabulary=64)).metrics()
    assert metrics["perplexity"] == pytest.approx(64, rel=1e-6)  # log 64 rounded to fp32 once


def test_chunks_of_positions_change_nothing(monkeypatch):
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(40)
    whole = token_nll(logits, targets)
    greedy = logits.float().max(-1).indices
    assert is_greedy(logits, greedy).all()
    for elements in (1, 50, 150, 1999):
        monkeypatch.setattr(perplexity, "CPU_CHUNK", elements)
        assert torch.equal(token_nll(logits, targets), whole)
        assert is_greedy(logits, greedy).all()
        for wrong in (0, 39):
            changed = greedy.clone()
            changed[wrong] = (changed[wrong] + 1) % 50
            assert not is_greedy(logits, changed).all()


@pytest.mark.parametrize("batch", [1, 2, 5, 9])
def test_batches_cover_all_windows_without_a_cache(batch):
    model, seen = Fixed(torch.randn(50, 50)), []
    found = window_losses(model, some_windows(), window_batch=batch, progress=lambda *x: seen.append(x))
    assert sum(shape[0] for shape, _, _ in model.calls) == 5
    assert max(shape[0] for shape, _, _ in model.calls) == min(batch, 5)
    assert all(not use_cache and inference for _, use_cache, inference in model.calls)
    assert seen[-1] == (5, 5)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert found.nll_sum.tolist() == window_losses(model, some_windows()).nll_sum.tolist()


def test_a_broken_model_has_an_infinite_perplexity():
    table = torch.full((50, 50), -2000.0)
    table[:, 0] = 2000.0  # sure of token 0, whatever comes
    data = Windows(np.full((1, 9), 3), np.arange(1), True, {})
    assert window_losses(Fixed(table), data).metrics()["perplexity"] == math.inf


# -- the whole way ------------------------------------------------------------------------------------------------


def test_evaluate_gives_metrics_arrays_and_protocol(tmp_path, tiny_bf16):
    path = tmp_path / "allenai/c4/en/validation.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": [f"Document {i}. " * (3 + i) for i in range(12)]}), path)
    spec, tokenizer = PerplexitySpec("c4", "c4", window_tokens=64, limit=4), byte_tokenizer()
    result = evaluate(tiny_bf16, tokenizer, spec, data_root=tmp_path, add_bos_token=True, window_batch=2)
    assert set(result.metrics) == {"perplexity", "nll", "tokens", "windows"}
    assert set(result.arrays) == {"nll_sum", "tokens", "cluster"}
    assert (result.samples, result.partial, result.rows) == (4, True, None)
    windows = build_windows(spec, tokenizer, data_root=tmp_path, add_bos_token=True)
    assert result.arrays["cluster"].tolist() == windows.clusters.tolist()
    assert result.protocol == {**windows.protocol, "window_batch": 2}
    total = result.arrays["nll_sum"].sum() / result.arrays["tokens"].sum()
    assert result.metrics["perplexity"] == math.exp(total)
    # Random weights know nothing: far from certain, not absurdly far from uniform over 258 tokens.
    assert 50 < result.metrics["perplexity"] < 5000


def test_windows_longer_than_the_context_are_refused(tiny):
    spec = PerplexitySpec("t", "text", window_tokens=8193)
    with pytest.raises(FcEvalError, match="set it to at most 8192"):
        evaluate(tiny, byte_tokenizer(), spec, data_root=None, add_bos_token=False)
