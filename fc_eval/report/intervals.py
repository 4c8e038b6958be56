"""95 % intervals as plots draw them."""

import math

from fc_eval.results.delta import Delta

Interval = tuple[float, float, float]


def ln_interval(d: Delta | None) -> Interval | None:
    """Middle, low and high of ln(PPL ratio); None where it is unknown, no width where the interval is."""
    if d is None or not math.isfinite(d.ln_ratio):
        return None
    if math.isnan(d.low) or d.baseline + d.low <= 0:
        return d.ln_ratio, d.ln_ratio, d.ln_ratio
    return d.ln_ratio, math.log1p(d.low / d.baseline), math.log1p(d.high / d.baseline)


def points_interval(d: Delta | None) -> Interval | None:
    """Middle, low and high of an accuracy delta in points; None where it is unknown."""
    if d is None or math.isnan(d.delta):
        return None
    low, high = (d.delta, d.delta) if math.isnan(d.low) else (d.low, d.high)
    return 100 * d.delta, 100 * low, 100 * high


def sides(intervals: list[Interval]) -> list[list[float]]:
    """How far intervals reach below and above their middles, as `errorbar` wants it."""
    return [[max(0.0, m - low) for m, low, _ in intervals], [max(0.0, high - m) for m, _, high in intervals]]
