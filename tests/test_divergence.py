"""Divergence against its definition in fp64, in the right direction, over the right tokens."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fc_eval.evaluate import perplexity
from fc_eval.evaluate.divergence import token_divergence, window_divergences
from fc_eval.evaluate.perplexity import window_losses
from fc_eval.evaluate.run import evaluate
from fc_eval.evaluate.spec import PerplexitySpec
from fc_eval.evaluate.windows import Windows
from fc_eval.models.tiny import byte_tokenizer

V = 40


class TwoFaced(torch.nn.Module):
    """Logits that depend on the input token alone: one table as it is, another one as the baseline."""

    def __init__(self, table, baseline):
        super().__init__()
        self.table, self.baseline = torch.nn.Parameter(table, requires_grad=False), baseline
        self.config = SimpleNamespace(max_position_embeddings=None)
        self.is_baseline, self.calls = False, []

    @contextmanager
    def as_baseline(self):
        self.is_baseline = True
        try:
            yield
        finally:
            self.is_baseline = False

    def forward(self, input_ids, use_cache):
        self.calls.append((self.is_baseline, len(input_ids)))
        return SimpleNamespace(logits=(self.baseline if self.is_baseline else self.table)[input_ids])


def noisy(scale, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = 3 * torch.randn(V, V, generator=generator)
    return TwoFaced((base + scale * torch.randn(V, V, generator=generator)).to(dtype), base.to(dtype))


def some_windows(n=4, window=17):
    return Windows(np.random.default_rng(1).integers(0, V, (n, window)), np.arange(n), True, {})


def fp64_kl(model):
    """KL(baseline || model) [V] of the prediction after each token."""
    log_p, log_q = (torch.log_softmax(t.double(), -1) for t in (model.baseline, model.table))
    return (log_p.exp() * (log_p - log_q)).sum(-1).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_is_that_of_the_baseline_to_the_model(dtype):
    model, data = noisy(1.0, dtype), some_windows()
    found = window_divergences(model, data, model.as_baseline)
    expected = fp64_kl(model)[data.ids[:, :-1]]
    reverse = fp64_kl(TwoFaced(model.baseline, model.table.detach()))[data.ids[:, :-1]]
    # 40 terms of fp32 rounding at logits of about 10: some 1e-6 absolute, against divergences of about 0.5.
    np.testing.assert_allclose(found.kl, expected, atol=1e-5)  # see above
    assert np.abs(expected - reverse).max() > 0.1  # the direction matters here
    metrics = found.metrics()
    assert metrics["kl_mean"] == pytest.approx(expected.mean(), abs=1e-5)  # fp32, as above
    assert metrics["kl_max"] == found.kl.max() == pytest.approx(expected.max(), abs=1e-5)  # fp32, as above
    assert metrics["kl_p95"] == np.percentile(found.kl, 95)
    assert found.kl.shape == found.same_top1.shape == (4, 16)


def test_top1_agreement_counts_equal_first_choices():
    model, data = noisy(2.0), some_windows()
    same = (model.table.argmax(-1) == model.baseline.argmax(-1)).numpy()[data.ids[:, :-1]]
    assert 0 < same.mean() < 1
    found = window_divergences(model, data, model.as_baseline)
    assert found.same_top1.tolist() == same.tolist()
    assert found.metrics()["same_top1"] == same.mean()


def test_a_model_does_not_diverge_from_itself():
    model = noisy(0.0, torch.bfloat16)
    metrics = window_divergences(model, some_windows(), model.as_baseline).metrics()
    assert [metrics[key] for key in ("kl_mean", "kl_p95", "kl_max", "same_top1")] == [0.0, 0.0, 0.0, 1.0]


def test_kl_is_never_negative():
    model = noisy(1e-4)  # true divergences near 1e-9, far below what fp32 resolves
    assert window_divergences(model, some_windows(), model.as_baseline).kl.min() >= 0.0


@pytest.mark.parametrize("batch", [1, 3])
def test_each_window_runs_once_as_it_is_and_once_as_the_baseline(batch):
    model, seen = noisy(1.0), []
    found = window_divergences(
        model, some_windows(), model.as_baseline, window_batch=batch, progress=lambda *x: seen.append(x)
    )
    sizes = [1, 1, 1, 1] if batch == 1 else [3, 1]
    assert model.calls == [(face, size) for size in sizes for face in (False, True)]
    assert not model.is_baseline
    assert seen[-1] == (4, 4)
    losses = window_losses(model, some_windows())
    # log_softmax and cross_entropy round the same fp32 sums; a mean over 16 tokens keeps that.
    np.testing.assert_allclose(found.losses.nll_sum, losses.nll_sum, rtol=1e-6)  # see above
    assert found.losses.tokens.tolist() == losses.tokens.tolist()


def test_chunks_of_positions_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    ours, base = (torch.randn(30, V, generator=generator).bfloat16() for _ in range(2))
    targets = torch.randint(0, V, (30,), generator=generator)
    whole = token_divergence(ours, base, targets)
    for elements in (1, 3 * V, 1000):
        monkeypatch.setattr(perplexity, "CPU_CHUNK", elements)
        for part, expected in zip(token_divergence(ours, base, targets), whole, strict=True):
            assert torch.equal(part, expected)


def test_a_known_divergence():
    # p = (1/2, 1/2), q = (3/4, 1/4): KL(p || q) = ln(4/3) / 2 + ... = 0.5 ln(1/2 / (3/4)) + 0.5 ln(1/2 / (1/4))
    q, p = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    nll, kl, same = token_divergence(q, p, torch.tensor([1]))
    expected = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert float(kl) == pytest.approx(expected, rel=1e-6)  # a handful of fp32 roundings
    assert float(nll) == pytest.approx(math.log(4), rel=1e-6)  # a handful of fp32 roundings
    assert bool(same)


def test_evaluate_adds_divergence_when_a_baseline_is_given(tiny):
    spec, weight = PerplexitySpec("t", "text", window_tokens=64, limit=3), tiny.model.layers[1].mlp.down_proj.weight

    @contextmanager
    def damaged():
        kept = weight.data.clone()
        weight.data.mul_(0.5)
        try:
            yield
        finally:
            weight.data.copy_(kept)

    plain = evaluate(tiny, byte_tokenizer(), spec, data_root=None, add_bos_token=True)
    found = evaluate(tiny, byte_tokenizer(), spec, data_root=None, add_bos_token=True, as_baseline=damaged)
    assert set(found.metrics) - set(plain.metrics) == {"kl_mean", "kl_p95", "kl_max", "same_top1"}
    assert set(found.arrays) - set(plain.arrays) == {"kl_mean", "same_top1"}
    assert found.arrays["kl_mean"].shape == found.arrays["same_top1"].shape == (3,)
    assert found.metrics["kl_mean"] == pytest.approx(found.arrays["kl_mean"].mean(), rel=1e-12)  # fp64 sums
    assert 0 < found.metrics["kl_mean"] < found.metrics["kl_p95"] < found.metrics["kl_max"]
    assert found.metrics["same_top1"] == pytest.approx(found.arrays["same_top1"].mean(), rel=1e-12)  # fp64 sums
    # The same logits went through log_softmax instead of cross_entropy.
    np.testing.assert_allclose(found.arrays["nll_sum"], plain.arrays["nll_sum"], rtol=1e-6)  # see above
