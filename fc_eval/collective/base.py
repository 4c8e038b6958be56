"""What an all-reduce returns: the reduced tensor, what it cost on the wire, and how many groups were non-finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # for the annotations alone: sizes can be asked for without loading a tensor library


@dataclass(frozen=True)
class StageTraffic:
    """Bytes of one stage.

    Attributes:
        stage: 'reduce', 'exchange' (between nodes) or 'gather'.
        bytes_per_rank: what each rank sends to other ranks, indexed by rank.
        encoded_bytes: one encoded message of the whole tensor in this stage's format, padding included.
    """

    stage: str
    bytes_per_rank: tuple[int, ...]
    encoded_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What one all-reduce of `elements` = T * H values moves.

    Attributes:
        elements: T * H.
        stages: in the order in which they happen; none at W = 1.
        qdq_rounds: quantize-dequantize round trips that a value passes (Flash Communication: 2; ring: W).
    """

    elements: int
    stages: tuple[StageTraffic, ...]
    qdq_rounds: int

    @property
    def effective_bits(self) -> float:
        """Bits per value, the mean over the stages, metadata and padding included; 0 where nothing moves."""
        if not self.stages or not self.elements:
            return 0.0
        return sum(8 * s.encoded_bytes / self.elements for s in self.stages) / len(self.stages)

    @property
    def wire_bytes_per_rank(self) -> int:
        """Bytes that the busiest rank sends to others over all stages."""
        if not self.stages:
            return 0
        ranks = range(len(self.stages[0].bytes_per_rank))
        return max(sum(stage.bytes_per_rank[rank] for stage in self.stages) for rank in ranks)


@dataclass(frozen=True)
class Reduced:
    """The result of an all-reduce.

    Attributes:
        values: [T, H] in the dtype of the partial sums, the same bits on every rank (but see `differing_values`).
        traffic: bytes and QDQ rounds.
        nonfinite_groups: int64 [stages], on the device: non-finite groups met in each stage, over all ranks.
        differing_values: int64 [], on the device: values that not all ranks hold alike; None where all always do.
    """

    values: torch.Tensor
    traffic: Traffic
    nonfinite_groups: torch.Tensor
    differing_values: torch.Tensor | None = None
