"""Numbers and tables as text: one way to write a delta with its error, wherever it stands.

Shares (accuracies) are written in percent and their deltas in points. An error is shown with two significant digits,
and its delta ends at the same place; shares have two decimals at least, so that their columns are even.
"""

import math
import re
from collections.abc import Sequence

from fc_eval.results.delta import Delta, is_share

MINUS, PLUS_MINUS, MISSING = "\N{MINUS SIGN}", "\N{PLUS-MINUS SIGN}", "n/a"
_NUMBER = re.compile(rf"[+{MINUS}]?[\d,]+(\.\d+)?")


def number(value: float, places: int, sign: bool = False) -> str:
    """A fixed number of decimals with a true minus sign; 'n/a' for NaN."""
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "inf" if value > 0 else f"{MINUS}inf"
    text = f"{abs(value):,.{places}f}" if abs(value) < 1e7 else f"{abs(value):.2e}"
    zero = float(text.replace(",", "")) == 0
    return (MINUS if value < 0 and not zero else "+" if sign and not zero else "") + text


def value_text(value: float, metric: str) -> str:
    """A metric's value alone: a share in percent, anything else with about four digits."""
    if is_share(metric):
        return number(100 * value, 2)
    if 0 < abs(value) < 0.1:
        return number(value, _places(metric, value) + 1)
    return number(value, 3 if abs(value) < 1000 else 1)


def value_with_error(d: Delta) -> str:
    """'0.0123 ± 0.0004': a value with its own sampling error."""
    places, scale = _places(d.metric, d.value_stderr), _scale(d.metric)
    return f"{number(scale * d.value, places)} {PLUS_MINUS} {number(scale * d.value_stderr, places)}"


def sampling_error(d: Delta) -> str:
    """'± 0.61': the own sampling error alone, empty where it is unknown."""
    stderr = _scale(d.metric) * d.value_stderr
    return "" if math.isnan(stderr) else f"{PLUS_MINUS} {number(stderr, _places(d.metric, d.value_stderr))}"


def delta_text(d: Delta) -> str:
    """'+0.0123 ± 0.0041': delta and its paired error; 'n/a' where there is no delta."""
    if math.isnan(d.delta):
        return MISSING
    places, scale = _places(d.metric, d.delta_stderr), _scale(d.metric)
    if d.delta == 0 and d.delta_stderr == 0:
        places = 2 if is_share(d.metric) else 0
    delta = number(scale * d.delta, places, sign=True)
    if math.isnan(d.delta_stderr) and d.samples == 1:
        return f"{delta} (one sample has no error)"
    return f"{delta} {PLUS_MINUS} {number(scale * d.delta_stderr, places)}"


def interval_text(d: Delta) -> str:
    """'[-0.40, +0.12]': the 95 % interval of the delta; empty where there is none."""
    if math.isnan(d.low) or math.isnan(d.high):
        return ""
    places, scale = _places(d.metric, d.delta_stderr), _scale(d.metric)
    return f"[{number(scale * d.low, places, sign=True)}, {number(scale * d.high, places, sign=True)}]"


def p_text(d: Delta) -> str:
    """'0.012 exact': p value and test; below 0.001 only that it is; empty where nothing was tested."""
    if math.isnan(d.p_value):
        return ""
    return ("<0.001" if d.p_value < 0.001 else f"{d.p_value:.3f}") + f" {d.test}"


def flips_text(d: Delta) -> str:
    """'9/2': questions lost and gained; empty where they were not counted."""
    return "" if d.lost is None else f"{d.lost}/{d.gained}"


def _scale(metric: str) -> float:
    return 100.0 if is_share(metric) else 1.0


def _places(metric: str, stderr: float) -> int:
    """Decimals that show an error with two significant digits, 0 to 8; for shares, in points, two at least."""
    least, unknown = (2, 2) if is_share(metric) else (0, 3)
    if not math.isfinite(stderr) or stderr <= 0:
        return unknown
    return min(8, max(least, 1 - math.floor(math.log10(_scale(metric) * stderr))))


def align_points(texts: Sequence[str], digit: str = " ", point: str = " ") -> list[str]:
    """Pads numbers, and both numbers of 'a ± b', so that right-aligned they stand with their points under each other.

    Args:
        texts: the cells of one column; cells that are no numbers stay as they are.
        digit: what is as wide as a digit (a figure space on a page, a space on a screen).
        point: what is as wide as a point.
    """
    aligned = list(texts)
    split = [text.split(f" {PLUS_MINUS} ") for text in texts]
    for size in (1, 2):
        members = [i for i, s in enumerate(split) if len(s) == size and all(map(_NUMBER.fullmatch, s))]
        columns = [_pad([split[i][k] for i in members], digit, point) for k in range(size)]
        for place, i in enumerate(members):
            aligned[i] = f" {PLUS_MINUS} ".join(column[place] for column in columns)
    return aligned


def _pad(numbers: Sequence[str], digit: str, point: str) -> list[str]:
    """Equal numbers of places on both sides of the point."""
    halves = [n.partition(".") for n in numbers]
    before = max((len(h[0]) for h in halves), default=0)
    after = max((len(h[2]) for h in halves), default=0)
    return [
        digit * (before - len(a)) + a + (dot or (point if after else "")) + b + digit * (after - len(b))
        for a, dot, b in halves
    ]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, over: Sequence[str] = ()) -> str:
    """A table for the screen: the first `left` columns left-aligned, the others right-aligned.

    Args:
        header: column titles.
        rows: cells.
        left: how many columns hold words.
        over: a heading per column; equal neighbours share one, which stands above them.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    spans: list[list[int]] = []
    for i, heading in enumerate(over):
        if spans and heading and over[spans[-1][-1]] == heading:
            spans[-1].append(i)
        else:
            spans.append([i])
    for span in spans:  # room for a heading that is wider than its columns
        widths[span[-1]] += max(0, len(over[span[0]]) - sum(widths[i] + 2 for i in span) + 2)
    above = "  ".join(over[span[0]].rjust(sum(widths[i] + 2 for i in span) - 2) for span in spans).rstrip()

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    lines = [line(header), "  ".join("-" * w for w in widths), *map(line, rows)]
    return "\n".join([above, *lines] if above else lines)
