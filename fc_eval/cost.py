"""What one all-reduce costs by count: steps, quantization rounds and bytes, from the traffic of each algorithm.

The model of Flash Communication's comparison of ring and flash all-reduce (arXiv 2412.04964). No tensor library.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fc_eval.collective.base import Traffic
from fc_eval.collective.comm import BASELINE, Comm, parse_comm
from fc_eval.collective.traffic import traffic_of


@dataclass(frozen=True)
class Cost:
    """One comm at one world size.

    Attributes:
        label: of the comm.
        world_size: W.
        steps: exchanges that wait for one another.
        qdq_rounds: quantize-dequantize round trips of a value.
        wire_bytes: that the busiest rank sends.
        wire_ratio: bytes of an unquantized two-step all-reduce / `wire_bytes`.
    """

    label: str
    world_size: int
    steps: int
    qdq_rounds: int
    wire_bytes: int
    wire_ratio: float


def costs(comms: Sequence[str], world_sizes: Sequence[int], tokens: int, hidden: int, dtype: str) -> list[Cost]:
    """The cost of quantized comms, by name, for one message of [tokens, hidden] values.

    Raises:
        FcEvalError: an unknown comm, or a shape or world size that is not possible.
    """
    found = []
    for world_size in world_sizes:
        unquantized = traffic_of(BASELINE, world_size, tokens, hidden, dtype).wire_bytes_per_rank
        for comm in (parse_comm(name) for name in comms):
            if not comm.is_quantized or world_size % (comm.node_size or 1):
                continue
            traffic = traffic_of(comm, world_size, tokens, hidden, dtype)
            sent = traffic.wire_bytes_per_rank
            steps = steps_of(comm, traffic, world_size)
            found.append(Cost(comm.label, world_size, steps, traffic.qdq_rounds, sent, unquantized / sent))
    return found


def steps_of(comm: Comm, traffic: Traffic, world_size: int) -> int:
    """Exchanges that wait for one another; an unquantized all-reduce is a ring, as NCCL does large ones."""
    rings = comm.algorithm == "ring" or not comm.is_quantized
    each = world_size - 1 if rings else 1  # a ring passes chunks on, the others send at once
    return each * len(traffic.stages)
