"""Paired statistics: both runs saw the same windows and questions, so what they share cancels. numpy and math only.

n windows or questions; "cluster" is the document that a window was cut from: windows of one document are not
independent, so their errors are summed before they are squared.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL = 0.95
RESAMPLES = 10_000
# Below so many discordant pairs the chi-square approximation of McNemar's test is poor and the exact test is cheap.
EXACT_BELOW = 25
# Resampled weights are drawn in pieces of at most so many numbers, which bounds the memory at about 80 MB.
_PIECE = 10_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean with its uncertainty.

    Attributes:
        value: the estimate.
        stderr: its standard error; NaN with fewer than two independent units.
        p_value: two-sided, of the hypothesis that the true value is 0.
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
        units: number of independent units (clusters).
    """

    value: float
    stderr: float
    p_value: float
    low: float
    high: float
    units: int


@dataclass(frozen=True)
class McNemar:
    """McNemar's test of two classifiers on the same questions.

    Attributes:
        lost: questions that only the first got right.
        gained: questions that only the second got right.
        p_value: two-sided.
        test: 'exact' (binomial) or 'chi2' (with continuity correction).
    """

    lost: int
    gained: int
    p_value: float
    test: Literal["exact", "chi2"]


def t_p_value(t: float, dof: int) -> float:
    """Two-sided p of Student's t, by the finite series for whole degrees of freedom.

    Source: Abramowitz and Stegun 1964, Handbook of Mathematical Functions, 26.7.3 and 26.7.4. The absolute error is
    about 1e-15, so smaller p values come out as such noise or 0.
    """
    if math.isnan(t):
        return math.nan
    theta = math.atan(abs(t) / math.sqrt(dof))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = dof % 2
    term = total = (0.0 if dof == 1 else cosine) if odd else 1.0
    for k in range(3 if odd else 2, dof - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


@functools.lru_cache(maxsize=256)
def t_quantile(dof: int, level: float = LEVEL) -> float:
    """The t with `level` of Student's distribution between -t and t, by bisection on `t_p_value`."""
    low, high = 0.0, 1.0
    while t_p_value(high, dof) > 1 - level:
        high *= 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_p_value(middle, dof) > 1 - level else (low, middle)
    return (low + high) / 2


def normal_p_value(z: float) -> float:
    """Two-sided p of a standard normal z."""
    return math.erfc(abs(z) / math.sqrt(2))


def ratio_estimate(totals_n: Floats, sizes_n: Floats, cluster_n: Ints) -> Estimate:
    """Sum of totals over sum of sizes, cluster-robust error, Student's t with (clusters - 1) degrees of freedom.

    The linearized variance of a ratio (Cochran 1977, Sampling Techniques, chapter 6) with residuals summed by cluster
    (Liang and Zeger 1986); the same use for language models: Miller 2024, arXiv 2411.00640. With one window per
    cluster and windows of equal size this is the textbook standard deviation over sqrt(n).

    Args:
        totals_n: [n] sums over each window, such as the difference of two negative log-likelihoods in nats.
        sizes_n: [n] what they are sums of, such as predicted tokens.
        cluster_n: [n] ids; equal ids are dependent.
    """
    size = float(sizes_n.sum())
    value = float(totals_n.sum()) / size
    ids, index_n = np.unique(cluster_n, return_inverse=True)
    units = len(ids)
    if units < 2 or not math.isfinite(value):
        return Estimate(value, math.nan, math.nan, math.nan, math.nan, units)
    residual_g = np.bincount(index_n, weights=totals_n - value * sizes_n)
    stderr = math.sqrt(units / (units - 1) * float(residual_g @ residual_g)) / size
    if stderr == 0.0:
        return Estimate(value, 0.0, 1.0 if value == 0.0 else 0.0, value, value, units)
    reach = t_quantile(units - 1) * stderr
    return Estimate(value, stderr, t_p_value(value / stderr, units - 1), value - reach, value + reach, units)


def ln_ppl_ratio(nll_n: Floats, base_nll_n: Floats, tokens_n: Ints, cluster_n: Ints) -> Estimate:
    """ln(PPL / baseline's PPL) over the same windows: the difference of NLL per token, with its paired error.

    The windows' own difficulty is in both runs and drops out of the difference (paired differences: Miller 2024,
    arXiv 2411.00640); llama.cpp reports the same quantity.

    Args:
        nll_n: [n] summed negative log-likelihood of each window, nats.
        base_nll_n: [n] the same of the baseline.
        tokens_n: [n] predicted tokens of each window.
        cluster_n: [n] document of each window.
    """
    return ratio_estimate(nll_n - base_nll_n, tokens_n.astype(np.float64), cluster_n)


def mcnemar(lost: int, gained: int) -> McNemar:
    """McNemar's test (McNemar 1947, Psychometrika 12) on the discordant pairs.

    Fewer than 25 discordant pairs: the exact two-sided binomial test with p = 1/2. Otherwise: chi-square with one
    degree of freedom and Edwards' continuity correction (Edwards 1948). No discordant pairs give p = 1.
    """
    discordant = lost + gained
    if discordant < EXACT_BELOW:
        tail = sum(math.comb(discordant, k) for k in range(min(lost, gained) + 1))
        return McNemar(lost, gained, min(1.0, 2 * tail / 2**discordant), "exact")
    chi2 = max(0, abs(lost - gained) - 1) ** 2 / discordant
    return McNemar(lost, gained, math.erfc(math.sqrt(chi2 / 2)), "chi2")


def mean_difference(difference_n: Floats) -> Estimate:
    """Mean of per-question differences with its paired standard error (Miller 2024, arXiv 2411.00640), Student's t."""
    return ratio_estimate(difference_n, np.ones(len(difference_n)), np.arange(len(difference_n)))


def paired_bootstrap(
    difference_n: Floats, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float]:
    """Percentile interval of the mean of per-question differences (Efron and Tibshirani 1993, chapter 13).

    Questions are resampled in pairs. How often each distinct difference is drawn follows a multinomial distribution,
    so the counts are drawn directly: the same distribution as resampling n questions, for three numbers instead of n.

    Args:
        difference_n: [n] second run minus first, per question.
        seed: of the generator; equal seeds give equal intervals.
        resamples: number of resamples.
        level: coverage of the interval.
    """
    values, counts = np.unique(difference_n, return_counts=True)
    n = len(difference_n)
    generator = np.random.default_rng(seed)
    step = max(1, _PIECE // len(values))
    means = np.concatenate(
        [
            generator.multinomial(n, counts / n, size=min(step, resamples - start)) @ values / n
            for start in range(0, resamples, step)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_of_independent(values: list[float], stderrs: list[float]) -> tuple[float, float]:
    """Unweighted mean of independent estimates; their errors add in squares (Miller 2024, arXiv 2411.00640)."""
    return math.fsum(values) / len(values), math.sqrt(math.fsum(e * e for e in stderrs)) / len(stderrs)


def recovery(value: float, baseline: float) -> float:
    """Share of the baseline's accuracy that is left: value / baseline, NaN for a baseline of 0."""
    return value / baseline if baseline else math.nan
