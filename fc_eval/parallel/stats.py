"""What a model's all-reduces cost: tallies per layer while it runs, and one frozen summary when asked."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fc_eval.collective.base import Reduced, Traffic


@dataclass(frozen=True)
class StageStats:
    """One stage, summed over all sites and calls.

    Attributes:
        stage: 'reduce', 'exchange' or 'gather'.
        elements: values that passed this stage (T * H per call).
        encoded_bytes: encoded messages of the whole tensor, padding included.
        bytes_per_rank: what each rank sent to other ranks, indexed by rank.
        nonfinite_groups: groups with a NaN or Inf (or an infinite range), over all ranks.
    """

    stage: str
    elements: int
    encoded_bytes: int
    bytes_per_rank: tuple[int, ...]
    nonfinite_groups: int


@dataclass(frozen=True)
class CommStats:
    """What the emulated all-reduces of a model did since the last reset.

    Attributes:
        world_size: W.
        forwards: forward passes of the text decoder.
        calls: all-reduces of each site, by full name; all 0 at W = 1, where nothing is reduced.
        tokens: tokens that went through the model: T, summed over forwards.
        elements: values reduced, over all sites: the sum of T * H.
        stages: in the order in which they happen.
        qdq_rounds: quantize-dequantize round trips that a value passes in one all-reduce, the most of any site.
        effective_bits: bits per value, metadata and padding included: each site's mean over its stages, weighted by
            elements (for one comm everywhere: the mean over stages of 8 * encoded bytes / elements).
        wire_bytes_per_rank: bytes that the busiest rank sent to others.
        unquantized_calls: all-reduces in which nothing was encoded, because of the comm or of its `min_tokens`.
        differing_values: values that one rank held otherwise than all others, in all-reduces of systems that allow it.
        codec: name of the codec that encoded; several are joined by '+', '' where nothing is encoded.
        notes: what codecs had to say about their choice.
    """

    world_size: int
    forwards: int
    calls: dict[str, int]
    tokens: int
    elements: int
    stages: tuple[StageStats, ...]
    qdq_rounds: int
    effective_bits: float
    wire_bytes_per_rank: int
    unquantized_calls: int
    differing_values: int
    codec: str
    notes: tuple[str, ...]

    @property
    def wire_bytes_per_token(self) -> float:
        """Bytes that the busiest rank sends for one token, over all sites; 0 where no token was seen."""
        return self.wire_bytes_per_rank / self.tokens if self.tokens else 0.0

    @property
    def nonfinite_groups(self) -> int:
        """Non-finite groups over all stages."""
        return sum(stage.nonfinite_groups for stage in self.stages)


@dataclass
class Tally:
    """Running counts of one site. Bytes depend on T alone, so calls are counted by T and priced once, at the end."""

    calls: Counter[int] = field(default_factory=Counter)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    # By the names of the stages: a call below `min_tokens` has others than the rest.
    nonfinite_groups: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)
    differing_values: torch.Tensor | None = None

    def add(self, tokens: int, reduced: Reduced) -> None:
        """Counts one all-reduce of `tokens` rows; leaves the device alone (no synchronization)."""
        self.calls[tokens] += 1
        self.traffic[tokens] = reduced.traffic
        add_groups(self.nonfinite_groups, {_stages_of(reduced.traffic): reduced.nonfinite_groups})
        self.add_differing(reduced.differing_values)

    def add_differing(self, more: torch.Tensor | None) -> None:
        """Counts values that ranks hold otherwise."""
        if more is not None:
            self.differing_values = more if self.differing_values is None else self.differing_values + more

    @property
    def tokens(self) -> int:
        """Rows reduced: the sum of T over calls."""
        return sum(tokens * calls for tokens, calls in self.calls.items())

    @property
    def elements(self) -> int:
        """Values reduced: the sum of T * H over calls."""
        return sum(self.traffic[tokens].elements * calls for tokens, calls in self.calls.items())

    @property
    def encoded_bits(self) -> float:
        """Bits of one encoded message, the mean over the stages, summed over calls."""
        # By T: a float sum that depended on the order of the calls would depend on who made them.
        priced = ((self.traffic[tokens], calls) for tokens, calls in sorted(self.calls.items()))
        return sum(traffic.effective_bits * traffic.elements * calls for traffic, calls in priced)

    @property
    def unquantized_calls(self) -> int:
        """Calls in which nothing was encoded."""
        return sum(calls for tokens, calls in self.calls.items() if not self.traffic[tokens].qdq_rounds)

    def stages(self) -> list[StageStats]:
        """The site's stages, summed over calls; the one place that waits for the device."""
        sums: dict[str, StageStats] = {}
        for names, groups in self.nonfinite_groups.items():
            calls = [(self.traffic[tokens], count) for tokens, count in self.calls.items()]
            priced = [(traffic, count) for traffic, count in calls if _stages_of(traffic) == names]
            for i, (name, found) in enumerate(zip(names, groups.tolist(), strict=True)):
                ranks = range(len(priced[0][0].stages[i].bytes_per_rank))
                more = StageStats(
                    stage=name,
                    elements=sum(traffic.elements * count for traffic, count in priced),
                    encoded_bytes=sum(traffic.stages[i].encoded_bytes * count for traffic, count in priced),
                    bytes_per_rank=tuple(
                        sum(traffic.stages[i].bytes_per_rank[rank] * count for traffic, count in priced)
                        for rank in ranks
                    ),
                    nonfinite_groups=found,
                )
                _accumulate(sums, more)
        return list(sums.values())


def _stages_of(traffic: Traffic) -> tuple[str, ...]:
    return tuple(stage.stage for stage in traffic.stages)


def add_groups(sums: dict[tuple[str, ...], torch.Tensor], more: Mapping[tuple[str, ...], torch.Tensor]) -> None:
    """Adds non-finite groups [stages], by the names of the stages."""
    for names, groups in more.items():
        # Out of place: a sum that was made in inference mode could not be changed outside of it.
        sums[names] = sums[names] + groups if names in sums else groups


# Forward passes, and the tally of each site by full name: what one process counted.
Counts = tuple[int, dict[str, Tally]]


def on_cpu(tally: Tally) -> Tally:
    """A copy that another process can be sent; waits for the device."""
    found = {names: groups.cpu() for names, groups in tally.nonfinite_groups.items()}
    differing = None if tally.differing_values is None else tally.differing_values.cpu()
    return Tally(Counter(tally.calls), dict(tally.traffic), found, differing)


def merged(counts: Iterable[Counts]) -> Counts:
    """The counts of several processes as if one had done the work of all."""
    forwards, sums = 0, dict[str, Tally]()
    for more, tallies in counts:
        forwards += more
        for name, tally in tallies.items():
            kept = sums.setdefault(name, Tally())
            kept.calls.update(tally.calls)
            kept.traffic.update(tally.traffic)
            add_groups(kept.nonfinite_groups, tally.nonfinite_groups)
            kept.add_differing(tally.differing_values)
    return forwards, sums


def _accumulate(sums: dict[str, StageStats], more: StageStats) -> None:
    old = sums.get(more.stage)
    if old is not None:
        more = StageStats(
            more.stage,
            old.elements + more.elements,
            old.encoded_bytes + more.encoded_bytes,
            tuple(a + b for a, b in zip(old.bytes_per_rank, more.bytes_per_rank, strict=True)),
            old.nonfinite_groups + more.nonfinite_groups,
        )
    sums[more.stage] = more


def summarize(
    tallies: Mapping[str, Tally], world_size: int, forwards: int, codecs: Iterable[str], notes: Iterable[str]
) -> CommStats:
    """Sums the tallies of all sites."""
    sums: dict[str, StageStats] = {}
    for tally in tallies.values():
        for stage in tally.stages():
            _accumulate(sums, stage)
    elements = sum(tally.elements for tally in tallies.values())
    sent = [sum(column) for column in zip(*(stage.bytes_per_rank for stage in sums.values()), strict=True)]
    rounds = [traffic.qdq_rounds for tally in tallies.values() for traffic in tally.traffic.values()]
    return CommStats(
        world_size=world_size,
        forwards=forwards,
        calls={name: tally.calls.total() for name, tally in tallies.items()},
        tokens=max((tally.tokens for tally in tallies.values()), default=0),
        elements=elements,
        stages=tuple(sums.values()),
        qdq_rounds=max(rounds, default=0),
        effective_bits=sum(t.encoded_bits for t in tallies.values()) / elements if elements else 0.0,
        wire_bytes_per_rank=max(sent, default=0),
        unquantized_calls=sum(tally.unquantized_calls for tally in tallies.values()),
        differing_values=sum(int(t.differing_values) for t in tallies.values() if t.differing_values is not None),
        codec="+".join(sorted(set(codecs))),
        notes=tuple(dict.fromkeys(notes)),
    )
