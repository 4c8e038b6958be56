"""Which comms are worth their bits or bytes: the Pareto front, and the cheapest within a loss budget, as tables."""

import math
from collections.abc import Sequence

from fc_eval.report.groups import Group, find
from fc_eval.report.tables import Cell, Column, Table
from fc_eval.results.compare import Paired
from fc_eval.results.delta import Delta
from fc_eval.results.text import MISSING, PLUS_MINUS, number

# Losses of perplexity, in percent of the baseline's.
BUDGETS = (1.0, 3.0, 5.0)

# Costs that differ by less count as equal: padding of blocks differs between formats and systems.
SLACK = 0.01

# Label, run, and the delta of one text.
Candidate = tuple[str, Paired, Delta]


def candidates(group: Group, name: str) -> list[Candidate]:
    """The quantized runs of a group whose perplexity on a text has a known ratio to the baseline's."""
    found = []
    for label, pair in zip(group.labels, group.pairs, strict=True):
        d = find(pair, name, "perplexity")
        if pair.record.arm.reduce_format is not None and d is not None and math.isfinite(d.ln_ratio):
            found.append((label, pair, d))
    return found


def bits_of(pair: Paired) -> float:
    """Effective bits per value."""
    return pair.record.wire_number("effective_bits")


def bytes_share(pair: Paired) -> float:
    """Bytes that the busiest rank sends, in percent of those of an unquantized all-reduce."""
    return 100 / pair.record.wire_number("wire_ratio")


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points (cost, loss) that no other beats in both, by rising cost.

    >>> front([(4, 0.5), (8, 0.1), (5, 0.6), (6, 0.1)])
    [0, 3]
    """
    kept: list[int] = []
    known = [i for i, (cost, _) in enumerate(points) if not math.isnan(cost)]
    for i in sorted(known, key=lambda i: points[i]):
        if not kept or points[i][1] < points[kept[-1]][1]:
            kept.append(i)
    return kept


def front_table(group: Group, name: str) -> Table | None:
    """The comms on the front over bits, over bytes per rank, or both; None with fewer than two candidates."""
    known = candidates(group, name)
    if len(known) < 2:
        return None
    fronts = [set(front([(cost(pair), d.ln_ratio) for _, pair, d in known])) for cost in (bits_of, bytes_share)]
    columns = ["comm", "bits", "bytes per rank, %", f"ln(PPL ratio) {PLUS_MINUS} error", "on the front over"]
    rows = []
    for i in sorted(fronts[0] | fronts[1], key=lambda i: (bits_of(known[i][1]), known[i][2].ln_ratio)):
        label, pair, d = known[i]
        over = " and ".join(what for what, members in zip(("bits", "bytes"), fronts, strict=True) if i in members)
        rows.append((Cell(label), *_cost(pair), _ratio(d), Cell(over)))
    return Table(tuple(Column(title, words=i in (0, 4)) for i, title in enumerate(columns)), tuple(rows))


def budget_table(group: Group) -> Table | None:
    """For each text and loss budget, the comm with the fewest bits that keeps it; None without a perplexity."""
    rows: list[tuple[Cell, ...]] = []
    for name in group.perplexities():
        known = candidates(group, name)
        for budget in BUDGETS if known else ():
            kept = [c for c in known if 100 * math.expm1(min(700.0, c[2].ln_ratio)) <= budget]
            head = Cell(group.evals[name].label), Cell(f"{budget:g} %", budget)
            if not kept:
                rows.append((*head, Cell("none of these"), Cell(MISSING), Cell(MISSING), Cell(MISSING)))
                continue
            label, pair, d = min(kept, key=lambda c: (bits_of(c[1]), c[2].ln_ratio))
            rows.append((*head, Cell(label), *_cost(pair), _ratio(d)))
    titles = ["evaluation", "budget", "cheapest comm", "bits", "bytes per rank, %", f"ln(PPL ratio) {PLUS_MINUS} error"]
    return (
        Table(tuple(Column(title, words=i in (0, 2)) for i, title in enumerate(titles)), tuple(rows)) if rows else None
    )


def equal_table(group: Group, name: str) -> Table | None:
    """Each other system's all-reduce beside the best of ours with at most its bits, and with at most its bytes.

    None where no other system's was run.
    """
    known = candidates(group, name)
    peers = [c for c in known if c[1].record.arm.algorithm == "peer"]
    own = [c for c in known if c[1].record.arm.algorithm != "peer"]
    ratio = f"ln(PPL ratio) {PLUS_MINUS} error"
    columns = [Column("comm", "other system", words=True)]
    columns += [Column(title, "other system") for title in ("bits", "bytes per rank, %", ratio)]
    for what in ("ours at equal bits", "ours at equal bytes"):
        columns += [Column("comm", what, words=True), Column("bits", what), Column("bytes per rank, %", what)]
        columns.append(Column(ratio, what))
    rows = []
    for label, pair, d in sorted(peers, key=lambda c: -bits_of(c[1])):
        cells = [Cell(label), *_cost(pair), _ratio(d)]
        for cost in (bits_of, bytes_share):
            fitting = [c for c in own if cost(c[1]) <= cost(pair) * (1 + SLACK)]
            if not fitting:
                cells += [Cell("none of these"), Cell(MISSING), Cell(MISSING), Cell(MISSING)]
                continue
            best = min(fitting, key=lambda c: (c[2].ln_ratio, cost(c[1])))
            cells += [Cell(best[0]), *_cost(best[1]), _ratio(best[2])]
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows)) if rows else None


def _cost(pair: Paired) -> tuple[Cell, Cell]:
    bits, share = bits_of(pair), bytes_share(pair)
    return Cell(number(bits, 2), bits), Cell(number(share, 1), share)


def _ratio(d: Delta) -> Cell:
    error = "" if math.isnan(d.ln_ratio_stderr) else f" {PLUS_MINUS} {number(d.ln_ratio_stderr, 4)}"
    return Cell(f"{number(d.ln_ratio, 4, sign=True)}{error}", d.ln_ratio)
