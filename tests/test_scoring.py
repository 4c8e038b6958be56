"""Log-likelihoods: those of lm-eval's own model, in fp32, with an explicit BOS; and the model `fc_eval` of lm-eval."""

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.scoring_lm import ScoringLM
from fc_eval.lm_eval_model import CommunicatingLM
from fc_eval.models.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def request(context, continuation):
    return Instance(request_type="loglikelihood", doc={}, arguments=(context, continuation), idx=0)


REQUESTS = [
    ("The sky is", " blue"),
    ("The sky is", " green and yellow"),
    ("A much longer context, so that the others are padded beside it:", " x"),
    ("Yes or no?", "a"),  # one-token choices after one context share a row
    ("Yes or no?", "b"),
    ("Yes or no?a", "b"),  # another split of the same characters
    ("", "empty context"),
]


@pytest.mark.parametrize("bos", [False, True])
def test_scores_equal_those_of_lm_evals_own_model(tiny, tokenizer, bos):
    ours = ScoringLM(tiny, tokenizer=tokenizer, backend="causal", add_bos_token=bos, batch_size=3)
    theirs = HFLM(tiny, tokenizer=tokenizer, backend="causal", add_bos_token=bos, batch_size=3)
    requests = [request(*pair) for pair in REQUESTS]
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)
    # fp32 logits of matrix products with other shapes: about 1e-6 per token.
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-5)  # see above
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_bf16_scores_are_summed_in_fp32(tiny_bf16, tokenizer):
    lm = ScoringLM(tiny_bf16, tokenizer=tokenizer, backend="causal", add_bos_token=False, batch_size=1)
    context, continuation = "Once upon a time", " there was a very long sentence that had many tokens in it"
    ((score, _),) = lm.loglikelihood([request(context, continuation)])
    ids = torch.tensor([tokenizer.encode(context + continuation, add_special_tokens=False)])
    logits = tiny_bf16(input_ids=ids[:, :-1]).logits[0].double()
    n = len(continuation)
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[-n:].sum()
    assert score == pytest.approx(float(expected), rel=1e-6)  # fp32 rounding; bf16 sums would be off by 1e-3


def test_greedy_continuations_are_recognised(tiny, tokenizer):
    context = tokenizer.encode("Hello", add_special_tokens=False)
    ids = tiny.generate(torch.tensor([context]), max_new_tokens=4, do_sample=False, pad_token_id=1, eos_token_id=None)
    best = ids[0, len(context) :].tolist()
    lm = ScoringLM(tiny, tokenizer=tokenizer, backend="causal", add_bos_token=False, batch_size=2)
    other = [*best[:-1], (best[-1] + 1) % 258]
    answers = lm._loglikelihood_tokens([(("", ""), context, best), (("", ""), context, other)])
    assert [greedy for _, greedy in answers] == [True, False]


def test_too_long_requests_lose_their_beginning_and_are_counted(tiny, tokenizer):
    lm = ScoringLM(tiny, tokenizer=tokenizer, backend="causal", add_bos_token=False, batch_size=2, max_length=8)
    long, short = lm.loglikelihood([request("0123456789abcdef", "xy"), request("9abcdef", "xy")])
    assert long == short
    assert lm.truncated == 1


def test_bos_is_explicit_whatever_the_tokenizer_does(tiny, tokenizer):
    without, with_bos = (
        ScoringLM(tiny, tokenizer=tokenizer, backend="causal", add_bos_token=bos, batch_size=2) for bos in (False, True)
    )

    plain_ids = without.tok_encode("ab")
    assert len(plain_ids) == 2
    assert with_bos.tok_encode("ab") == [tokenizer.bos_token_id, *plain_ids]
    assert with_bos.tok_encode("<s>ab") == [tokenizer.bos_token_id, *plain_ids]  # written by a chat template
    assert with_bos.tok_encode("abc", left_truncate_len=2) == without.tok_encode("bc")
    batch, mask = with_bos.tok_batch_encode(["abc", "a"])
    assert batch[0].tolist() == with_bos.tok_encode("abc")
    assert batch[1].tolist() == [tokenizer.pad_token_id] * 2 + with_bos.tok_encode("a")
    assert mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


def test_an_automatic_batch_size_is_refused(tiny, tokenizer):
    with pytest.raises(FcEvalError, match="not a whole number"):
        ScoringLM(tiny, tokenizer=tokenizer, backend="causal", add_bos_token=False, batch_size="auto")


def test_lm_eval_knows_a_model_that_communicates(tiny, tokenizer):
    assert get_model("fc_eval") is CommunicatingLM
    requests = [request(*pair) for pair in REQUESTS]
    before = ScoringLM(tiny, tokenizer=tokenizer, backend="causal", add_bos_token=False, batch_size=3).loglikelihood(
        requests
    )
    lm = CommunicatingLM(
        tiny, comm="int4", tp=4, codec="reference", tokenizer=tokenizer, add_bos_token=False, batch_size=3
    )
    quantized = lm.loglikelihood(requests)
    lm.close()
    assert quantized != before
    assert lm.loglikelihood(requests) == before
    with pytest.raises(FcEvalError, match="say add_bos_token"):
        CommunicatingLM(tiny, tokenizer=tokenizer)
