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
        one_of: one value of so many of a group is sent, with its position; 1 for all of them.
    """

    name: str
    system: str
    label: str
    bits: int
    group_size: int | None
    scale_bytes: int
    one_of: int = 1

    def kept(self, group: int) -> int:
        """Values of a group that are sent."""
        return -(-group // self.one_of)

    def group_bits(self, group: int) -> int:
        """Bits of a group's codes; where some values are left out, with the position of each that is not."""
        position = (group - 1).bit_length() if self.one_of > 1 else 0
        return self.kept(group) * (self.bits + position)

    def nominal_bits(self, hidden: int) -> float:
        """Bits per value of a large message; where its shape decides, of one with as many rows as `hidden` columns."""
        group = self.group_size or hidden
        return (self.group_bits(group) + 8 * self.scale_bytes) / group


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
    PeerFormat("channelwise_int4", "channelwise", "channel-wise INT4", 4, None, 2),
    PeerFormat("topk_4", "topk", "TopK 1/4", 16, None, 0, one_of=4),
    PeerFormat("topk_6", "topk", "TopK 1/6", 16, None, 0, one_of=6),
    PeerFormat("topk_8", "topk", "TopK 1/8", 16, None, 0, one_of=8),
)
PEERS: dict[str, PeerFormat] = {row.name: row for row in _ROWS}
