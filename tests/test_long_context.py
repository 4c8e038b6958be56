"""Windows of several lengths in one run: logits in parts, refusals before anything is computed, names, and a plot."""

import numpy as np
import pytest
import torch
from conftest import attach
from run_fixtures import Run, quantized, write_run

from fc_eval.compose import compose_one
from fc_eval.evaluate import logits
from fc_eval.evaluate.divergence import window_divergences
from fc_eval.evaluate.logits import logits_parts, without_logits
from fc_eval.evaluate.perplexity import window_losses
from fc_eval.evaluate.windows import Windows
from fc_eval.report.groups import group_pairs
from fc_eval.report.plot_context import context_plots
from fc_eval.results.compare import pair_runs
from fc_eval.results.record import load_runs
from fc_eval.results.store import RunStore
from fc_eval.sweep.execute import execute

VOCABULARY = 258


def some_windows(n=2, window=41):
    return Windows(np.random.default_rng(1).integers(0, 200, (n, window)), np.arange(n), True, {})


@pytest.fixture
def in_parts(monkeypatch):
    """Logits of 7 positions of 2 windows at a time."""
    monkeypatch.setattr(logits, "WHOLE_LOGITS", 14 * VOCABULARY)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma 2 caps its logits after the head
@torch.inference_mode()
def test_parts_are_the_logits_of_one_decoder_pass(family_model, in_parts, family):
    model, ids, passes = family_model(family), torch.tensor(some_windows().ids), []
    whole = model(input_ids=ids, use_cache=False).logits
    hook = model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    parts = list(logits_parts(model, ids))
    hook.remove()
    assert [(part.start, part.stop) for part, _ in parts] == [(i, min(i + 7, 41)) for i in range(0, 40, 7)]
    assert len(passes) == 1
    found = torch.cat([found for _, found in parts], dim=1)
    # fp32 products over fewer rows may be added up in another order.
    torch.testing.assert_close(found, whole[:, : found.shape[1]], rtol=1e-5, atol=1e-5)  # see above
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, whole)


def test_no_part_is_the_last_position_alone(tiny, in_parts):
    ids = torch.tensor(some_windows(2, 36).ids)
    with torch.inference_mode():
        assert [part.stop for part, _ in logits_parts(tiny, ids)] == [7, 14, 21, 28, 35]


def test_losses_and_divergences_in_parts_are_those_of_whole_windows(tiny, monkeypatch):
    windows = some_windows(3)

    def measured():
        with attach(tiny, "int4-g32", 2) as attachment:
            losses = window_losses(tiny, windows, window_batch=2)
            attachment.check_calls()
            found = window_divergences(tiny, windows, lambda: attachment.using("fp32_ordered"), window_batch=2)
            attachment.check_calls()
        return losses, found

    whole_losses, whole = measured()
    monkeypatch.setattr(logits, "WHOLE_LOGITS", 14 * VOCABULARY)
    losses, found = measured()
    # fp32 products over fewer rows may be added up in another order, here and below.
    np.testing.assert_allclose(losses.nll_sum, whole_losses.nll_sum, rtol=1e-6)  # see above
    np.testing.assert_allclose(found.kl, whole.kl, rtol=1e-3, atol=1e-6)  # a difference of two such logarithms
    assert found.kl.shape == (3, 40)
    assert losses.nll_sum.tolist() == found.losses.nll_sum.tolist()


def test_an_interrupted_part_leaves_the_model_as_it_was(tiny, in_parts, monkeypatch):
    decoder = tiny.base_model
    monkeypatch.setattr(tiny.lm_head, "forward", lambda *_: 1 / 0)
    with torch.inference_mode(), pytest.raises(ZeroDivisionError):
        list(logits_parts(tiny, torch.tensor(some_windows().ids)))
    assert tiny.base_model is decoder


def test_a_pass_for_the_layers_alone_makes_one_position_of_logits(tiny):
    shapes = []
    hook = tiny.lm_head.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    with torch.inference_mode():
        without_logits(tiny, torch.tensor(some_windows().ids))
    hook.remove()
    assert shapes == [(2, 1, VOCABULARY)]


# -- several lengths in one run -----------------------------------------------------------------------------------


def test_lengths_are_evaluations_of_their_own():
    config = compose_one(["model=tiny", "eval=[window_lengths,text_16384,text_32768]", "eval.limit=1"])
    found = {spec.name: spec.window_tokens for spec in config.eval.specs}
    assert found == {"text": 2048} | {f"text_{tokens}": tokens for tokens in (4096, 8192, 16384, 32768)}


def test_a_window_that_is_too_long_stops_the_run_before_any_evaluation(tmp_path, in_this_process):
    store, said = RunStore(tmp_path), []
    store.prepare()
    long = "+eval.runs.long={kind:perplexity,protocol:text,window_tokens:9000,limit:1}"
    settings = ["model=tiny", "tp=2", "comm=fp32_ordered", "eval=text", "eval.limit=1", "threads=1", "device=cpu", long]
    (outcome,) = execute(compose_one([*settings, "eval.runs.text.window_tokens=64"]), store, say=said.append)
    assert (outcome.state, outcome.mistake) == ("failed", True)
    assert outcome.error == (
        "window_tokens=9000 of evaluation 'long' is longer than this model's context: set it to at most 8192"
    )
    assert not (outcome.folder.path / "evals").exists()


def test_a_plot_over_the_length_of_the_window(tmp_path):
    texts = {"text_2048": 2048, "text_8192": 8192}
    both = Run(texts=tuple(texts), protocol={"protocol": "text"})
    for run in (both, quantized(both, "int4", 4.25, 0.02, protocol=both.protocol)):
        path = write_run(tmp_path, run)
        file = path / "result.json"
        text = file.read_text()
        for name, tokens in texts.items():
            head, mark, tail = text.partition(f'"{name}": {{\n   "bos"')
            assert mark
            text = head + mark + tail.replace('"window_tokens": 2048', f'"window_tokens": {tokens}', 1)
        file.write_text(text)
    records, problems = load_runs(tmp_path)
    assert not problems
    (group,) = group_pairs(pair_runs(records))
    (plot,) = context_plots(group)
    assert plot.name == "delta_over_window_smollm2_bf16_tp4_cpu_text"
    assert all(text in plot.svg for text in ("2,048", "8,192", "INT4 g128", "window, tokens"))
    single = write_run(tmp_path / "single", Run())
    (group,) = group_pairs(pair_runs(load_runs(single)[0]))
    assert context_plots(group) == []
