"""Paired statistics against SciPy, against brute force, and on data whose answer is known."""

import math

import numpy as np
import pytest
import scipy.stats

from fc_eval.results.statistics import (
    ln_ppl_ratio,
    mcnemar,
    mean_difference,
    mean_of_independent,
    normal_p_value,
    paired_bootstrap,
    ratio_estimate,
    recovery,
    t_p_value,
    t_quantile,
)


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 6, 15, 16, 141, 10041])
@pytest.mark.parametrize("t", [0.0, 0.01, 0.7, 1.0, -1.96, 3.3, 8.0])
def test_student_t_against_scipy(dof, t):
    expected = 2 * scipy.stats.t.sf(abs(t), dof)
    assert t_p_value(t, dof) == pytest.approx(expected, abs=1e-12)  # abs: 1 - p is a sum of up to 5000 rounded terms


@pytest.mark.parametrize("dof", [1, 2, 7, 15, 165, 10041])
def test_t_quantile_against_scipy(dof):
    expected = scipy.stats.t.ppf(0.975, dof)
    assert t_quantile(dof) == pytest.approx(expected, rel=1e-8)  # rel: bisection stops at 1e-10


def test_t_of_nan_is_nan():
    assert math.isnan(t_p_value(math.nan, 5))


def test_normal_p_value_against_scipy():
    for z in (0.0, 0.5, -1.959964, 4.0):
        assert normal_p_value(z) == pytest.approx(2 * scipy.stats.norm.sf(abs(z)), rel=1e-12)  # rel: two erfc codes


def test_exact_mcnemar_equals_binomial_test():
    for lost in range(25):
        for gained in range(25 - lost):
            result = mcnemar(lost, gained)
            assert result.test == "exact"
            expected = scipy.stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
            assert result.p_value == pytest.approx(expected, rel=1e-12)  # rel: scipy's is rounded


@pytest.mark.parametrize(("lost", "gained"), [(25, 0), (13, 12), (12, 13), (20, 20), (40, 11), (300, 210)])
def test_mcnemar_with_continuity_correction(lost, gained):
    result = mcnemar(lost, gained)
    statistic = max(0, abs(lost - gained) - 1) ** 2 / (lost + gained)
    assert result.test == "chi2"
    assert result.p_value == pytest.approx(scipy.stats.chi2.sf(statistic, 1), rel=1e-12)  # rel: erfc and chi2 codes
    assert (result.lost, result.gained) == (lost, gained)


def test_mcnemar_is_symmetric_and_switches_at_25():
    assert mcnemar(3, 21).test == "exact"
    assert mcnemar(3, 22).test == "chi2"
    assert mcnemar(5, 11).p_value == mcnemar(11, 5).p_value


def test_pairing_finds_what_an_unpaired_test_misses():
    # 220 questions, 213 and 205 right, the 8 lost ones among those that were right before.
    base_n, arm_n = np.zeros(220), np.zeros(220)
    base_n[:213] = 1
    arm_n[:205] = 1
    errors = [math.sqrt(x.mean() * (1 - x.mean()) / len(x)) for x in (base_n, arm_n)]
    unpaired = normal_p_value((arm_n.mean() - base_n.mean()) / math.hypot(*errors))
    assert unpaired > 0.05
    paired = mcnemar(int((arm_n < base_n).sum()), int((arm_n > base_n).sum()))
    assert (paired.lost, paired.gained) == (8, 0)
    assert paired.p_value == 2 / 2**8  # 0.0078
    assert unpaired == pytest.approx(0.080, abs=0.002)  # abs: the figure is known to three decimals


def test_ln_ratio_of_independent_windows_is_a_t_test():
    rng = np.random.default_rng(1)
    tokens_n = np.full(40, 2047)
    base_n = rng.normal(6000, 500, 40)  # windows differ by hundreds of nats ...
    nll_n = base_n + rng.normal(8, 3, 40)  # ... the effect is 8 nats a window
    found = ln_ppl_ratio(nll_n, base_n, tokens_n, np.arange(40))
    per_token_n = (nll_n - base_n) / 2047
    expected = scipy.stats.ttest_rel(nll_n / 2047, base_n / 2047)
    assert found.value == pytest.approx(per_token_n.mean(), rel=1e-12)  # rel: another order of summation
    assert found.stderr == pytest.approx(scipy.stats.sem(per_token_n), rel=1e-9)  # rel: differences of large sums
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-12)  # abs: p is 1 minus a rounded sum
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-7), pytest.approx(high, rel=1e-7))  # rel: bisection
    assert found.units == 40


def test_ln_ratio_known_answer():
    # Two windows of 10 tokens, 1 and 3 nats worse: 4 / 20 per token; standard error sqrt(2) / sqrt(2) / 10.
    found = ln_ppl_ratio(np.array([21.0, 33.0]), np.array([20.0, 30.0]), np.array([10, 10]), np.array([0, 1]))
    assert found.value == 0.2
    assert found.stderr == pytest.approx(0.1, rel=1e-15)  # rel: one rounding of a square root
    # t = 2 with one degree of freedom: p = 1 - 2 atan(2) / pi
    assert found.p_value == pytest.approx(1 - 2 * math.atan(2) / math.pi, abs=1e-15)  # abs: one rounding


def test_identical_runs_have_no_difference():
    nll_n = np.array([20.0, 30.0, 25.0])
    found = ln_ppl_ratio(nll_n, nll_n, np.array([10, 10, 10]), np.arange(3))
    assert (found.value, found.stderr, found.p_value, found.low, found.high) == (0.0, 0.0, 1.0, 0.0, 0.0)


def test_clusters_count_once():
    # Each document seen four times says no more than seen once: errors by window would be half as large.
    rng = np.random.default_rng(2)
    base_n = rng.normal(6000, 500, 30)
    nll_n = base_n + rng.normal(5, 4, 30)
    tokens_n = np.full(30, 2047)
    once = ln_ppl_ratio(nll_n, base_n, tokens_n, np.arange(30))
    four = [np.repeat(x, 4) for x in (nll_n, base_n, tokens_n, np.arange(30))]
    clustered = ln_ppl_ratio(*four)
    assert clustered.stderr == pytest.approx(once.stderr, rel=1e-9)  # rel: differences of large sums
    assert clustered.units == 30
    naive = ln_ppl_ratio(*four[:3], np.arange(120))
    assert naive.stderr < 0.51 * once.stderr


def test_cluster_error_against_simulation():
    # 12 documents with 1 to 5 windows and a shared effect: the mean estimated error must match the actual spread.
    rng = np.random.default_rng(3)
    cluster_n = np.repeat(np.arange(40), np.arange(40) % 5 + 1)
    sizes_n = np.full(len(cluster_n), 100.0)
    values, errors = [], []
    for _ in range(2000):
        totals_n = rng.normal(0, 3, 40)[cluster_n] + rng.normal(0, 1, len(cluster_n))
        found = ratio_estimate(totals_n, sizes_n, cluster_n)
        values.append(found.value)
        errors.append(found.stderr)
    spread = float(np.std(values))
    assert np.mean(errors) == pytest.approx(spread, rel=0.06)  # rel: 1.6 % from 2000 draws, 3 % bias at 40 clusters


def test_one_document_has_no_error():
    found = ln_ppl_ratio(np.array([2.0, 3.0]), np.array([1.0, 1.0]), np.array([10, 10]), np.array([7, 7]))
    assert found.value == 0.15
    assert math.isnan(found.stderr)
    assert math.isnan(found.p_value)


def test_non_finite_losses_give_nan_not_a_number_that_looks_fine():
    found = ln_ppl_ratio(np.array([np.inf, 3.0]), np.array([1.0, 1.0]), np.array([10, 10]), np.array([0, 1]))
    assert math.isinf(found.value)
    assert math.isnan(found.stderr)


def test_mean_difference_is_the_paired_t_test():
    rng = np.random.default_rng(4)
    base_n, arm_n = (rng.integers(0, 2, 500).astype(float) for _ in range(2))
    found = mean_difference(arm_n - base_n)
    expected = scipy.stats.ttest_rel(arm_n, base_n)
    assert found.stderr == pytest.approx(scipy.stats.sem(arm_n - base_n), rel=1e-12)  # rel: order of summation
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-12)  # abs: p is 1 minus a rounded sum


def test_bootstrap_matches_resampled_questions():
    rng = np.random.default_rng(5)
    difference_n = rng.choice([-1.0, 0.0, 1.0], 400, p=[0.12, 0.80, 0.08])
    draws = rng.integers(0, 400, (10_000, 400))
    low, high = np.quantile(difference_n[draws].mean(axis=1), [0.025, 0.975])
    found = paired_bootstrap(difference_n)
    # The quantile of 10,000 resamples of a mean with error 0.022 has an error of about 0.0006.
    assert found[0] == pytest.approx(low, abs=0.003)  # abs: a few times the noise of two such quantiles
    assert found[1] == pytest.approx(high, abs=0.003)  # abs: a few times the noise of two such quantiles
    reference = scipy.stats.bootstrap((difference_n,), np.mean, method="percentile", rng=rng)
    expected = reference.confidence_interval.low
    assert found[0] == pytest.approx(expected, abs=0.003)  # abs: a few times the noise of two such quantiles


def test_bootstrap_of_many_distinct_values_is_drawn_in_pieces(monkeypatch):
    from fc_eval.results import statistics

    difference_n = np.random.default_rng(6).normal(0.1, 1, 300)
    monkeypatch.setattr(statistics, "_PIECE", 300 * 64)
    low, high = paired_bootstrap(difference_n)
    reach = 1.96 * difference_n.std() / math.sqrt(300)
    assert low == pytest.approx(difference_n.mean() - reach, abs=0.01)  # abs: a tenth of the error, a quantile's noise
    expected = difference_n.mean() + reach
    assert high == pytest.approx(expected, abs=0.01)  # abs: noise of a quantile, a tenth of the error


def test_bootstrap_is_seeded_and_ordered():
    difference_n = np.array([1.0] * 3 + [-1.0] * 9 + [0.0] * 88)
    assert paired_bootstrap(difference_n) == paired_bootstrap(difference_n)
    assert paired_bootstrap(difference_n, seed=1) != paired_bootstrap(difference_n, seed=2, level=0.90)
    low, high = paired_bootstrap(difference_n)
    assert low < -0.06 < high
    assert paired_bootstrap(np.zeros(50)) == (0.0, 0.0)


def test_mean_of_independent_adds_errors_in_squares():
    assert mean_of_independent([0.1, 0.3], [0.03, 0.04]) == (0.2, 0.025)


def test_recovery():
    assert recovery(0.6, 0.8) == 0.6 / 0.8
    assert math.isnan(recovery(0.1, 0.0))
