"""The formats of other systems as rows. Pure data; the arithmetic is in the module of each system."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerFormat:
    """One format of another system.

    Attributes:
        name: as a comm on the command line.
        system: whose it is; a key of `round_trip.SYSTEMS` and of `collective.peer_rules.RULES`.
        label: for tables.
        bits: bits per code.
        group_size: values with one scale, consecutive in the flattened message unless the system says otherwise; None
            where the shape of the message decides.
        scale_bytes: what the scale of a group takes on the wire.
    """

    name: str
    system: str
    label: str
    bits: int
    group_size: int | None
    scale_bytes: int

    def nominal_bits(self, hidden: int) -> float:
        """Bits per value of a large message; where its shape decides, of one with more rows than `hidden` columns."""
        return self.bits + 8 * self.scale_bytes / (self.group_size or hidden)


_ROWS = (
    PeerFormat("quickreduce_q8", "quickreduce", "QuickReduce Q8", 8, 32, 2),
    PeerFormat("quickreduce_q6", "quickreduce", "QuickReduce Q6", 6, 32, 2),
    PeerFormat("quickreduce_q4", "quickreduce", "QuickReduce Q4", 4, 32, 2),
    PeerFormat("quickreduce_int3", "quickreduce", "QuickReduce INT3", 3, 32, 2),
    PeerFormat("flashinfer_fp8", "flashinfer", "FlashInfer FP8", 8, 256, 4),
    PeerFormat("vllm_int8", "vllm", "vLLM INT8", 8, 256, 4),
    PeerFormat("tensorrt_llm_fp8", "tensorrt_llm", "TensorRT-LLM FP8", 8, 496, 16),
    PeerFormat("zeropp_int8", "zeropp", "ZeRO++ INT8", 8, None, 4),
    PeerFormat("zeropp_int4", "zeropp", "ZeRO++ INT4", 4, None, 4),
)
PEERS: dict[str, PeerFormat] = {row.name: row for row in _ROWS}
