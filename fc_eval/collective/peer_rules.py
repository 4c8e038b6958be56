"""How other systems reduce: who owns what, in which dtype and order values are summed, what stays exact. No tensors.

Sources as in `fc_eval.codec.peers`. Limits of the systems themselves (W of 2, 4 or 8, one dtype, multiples of some
number of values) are not repeated: where a message is too short, zeros fill it up, and other W follow the same rule.
W ranks, T tokens, H hidden.
"""

from dataclasses import dataclass
from typing import Literal

from fc_eval.codec.peers.table import PeerFormat
from fc_eval.errors import FcEvalError
from fc_eval.wire.layout import owned_blocks


@dataclass(frozen=True)
class PeerRule:
    """One system's rules.

    Attributes:
        sums_in: the dtype in which decoded values are summed, from zero; also that of the values that are encoded.
        unit: consecutive values that have one owner; None for one group.
        padded_to: a message is filled with zeros to a multiple of this; None for one group.
        masked: what fills up the end of a message is not sent.
        cyclic: unit u belongs to rank u mod W; otherwise a rank's units are consecutive.
        cut: the message is cut into a part for each rank first, and each part filled up on its own.
        own_first: the owner adds its own contribution first, then those of the ranks after it; otherwise rank 0 first.
        exact_own: the owner keeps the sum that it did not encode, so that ranks end with different values.
        island_of_8: ranks of an island at W = 8, where the system reduces hierarchically; None for never.
        one_step: every rank sends its whole message to all others, which sum what arrives, in rank order.
        columns: a group is a column of the message; otherwise, where its shape decides, consecutive values.
    """

    sums_in: Literal["fp16", "fp32"]
    unit: int | None = None
    padded_to: int | None = None
    masked: bool = False
    cyclic: bool = False
    cut: bool = False
    own_first: bool = False
    exact_own: bool = False
    island_of_8: int | None = None
    one_step: bool = False
    columns: bool = False


RULES: dict[str, PeerRule] = {
    # A workgroup has a tile of 16384 values in 8 pieces, which the ranks share; it sends whole tiles.
    "quickreduce": PeerRule("fp16", unit=2048, padded_to=16384),
    # Blocks of 4096 values (messages up to 64 MiB) in turn; masked at the end of the message.
    "flashinfer": PeerRule("fp32", unit=4096, masked=True, cyclic=True, exact_own=True),
    # The same design; the size of a block is inferred from it.
    "vllm": PeerRule("fp32", unit=4096, masked=True, cyclic=True, exact_own=True),
    # At W = 8 the lines are those of the whole message; who owns which of them, and that sums are in rank order there,
    # is inferred.
    "tensorrt_llm": PeerRule("fp32", cut=True, own_first=True, island_of_8=4),
    # Its two hops reduce gradients; that the second one carries the gather of an all-reduce is inferred.
    "zeropp": PeerRule("fp16"),
    # All partial sums are gathered compressed, decompressed and summed (arXiv 2411.09510); a row of TopK is a token.
    "channelwise": PeerRule("fp32", one_step=True, columns=True),
    "topk": PeerRule("fp32", one_step=True),
}


@dataclass(frozen=True)
class PeerMessage:
    """The flattened message of one rank.

    Attributes:
        values: T * H, without padding.
        parts: pieces that are filled up on their own.
        part: values of a part, padding left out; the last part may hold fewer.
        padded: values of a part with the zeros that fill it up.
        sent: values of the whole message that travel, padding among them unless it is masked.
        group: values with one scale.
        node_size: ranks among which a reduce-scatter happens: W, or those of an island.
    """

    fmt: PeerFormat
    values: int
    parts: int
    part: int
    padded: int
    sent: int
    group: int
    node_size: int

    @property
    def one_step(self) -> bool:
        """Whether each rank sends the whole of it to all others."""
        return RULES[self.fmt.system].one_step

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole message."""
        return self._bytes(self.sent)

    def owned_bytes(self) -> tuple[int, ...]:
        """Bytes of what each rank of a node owns."""
        rule, size = RULES[self.fmt.system], self.node_size
        unit = rule.unit or self.group
        units = -(-self.sent // unit)
        owned = [range(r, units, size) if rule.cyclic else owned_blocks(units, r, size) for r in range(size)]
        missing = units * unit - self.sent
        return tuple(self._bytes(len(own) * unit - (missing if units - 1 in own else 0)) for own in owned)

    def _bytes(self, values: int) -> int:
        groups = -(-values // self.group)
        if self.fmt.one_of > 1:
            return groups * -(-self.fmt.group_bits(self.group) // 8)
        return -(-values * self.fmt.bits // 8) + groups * self.fmt.scale_bytes


def message_of(fmt: PeerFormat, world_size: int, tokens: int, hidden: int) -> PeerMessage:
    """What a rank's partial sum [tokens, hidden] is as a message, at W >= 2.

    Raises:
        FcEvalError: a negative or empty shape.
    """
    if tokens < 0 or hidden < 1:
        raise FcEvalError(f"a message of {tokens} x {hidden} values is not possible: expected T >= 0 and H >= 1")
    rule, values = RULES[fmt.system], tokens * hidden
    if rule.one_step:
        group = max(1, tokens) if rule.columns else hidden
        return PeerMessage(fmt, values, 1, values, values, values, group, world_size)
    group = fmt.group_size or max(1, -(-values // max(tokens, hidden, world_size)))
    islands = world_size == 8 and rule.island_of_8 is not None
    node_size = rule.island_of_8 if islands and rule.island_of_8 else world_size
    parts = world_size if rule.cut and not islands else 1
    part = -(-values // parts)
    multiple = rule.padded_to or group
    padded = -(-part // multiple) * multiple
    return PeerMessage(fmt, values, parts, part, padded, values if rule.masked else parts * padded, group, node_size)
