"""A `Comm` says how one all-reduce is done: the algorithm and the format of each of its stages. No tensors.

int4                two-step, INT4 in both stages          int4_int8    INT4 reduce, INT8 gather ("INT6" of
one_step:int6       one-step, no gather format                          Flash Communication, arXiv 2412.04964)
ring:int4-g32       ring                                   int4/int8    the same, any two full format names
fp32_ordered        no quantization, the baseline          plain        the framework's own all-reduce
ring_int4           ring:int4; the presets' way to write   hierarchical_int4    hierarchical@2:int4
int4+min64          int4 where a call has 64 tokens or more, fp32_ordered for the others
quickreduce_q4      the all-reduce of another system with its own format and rules (emulated only), in full
                    peer:quickreduce_q4; `fc_eval.codec.peers.table` names them
"""

import re
from dataclasses import dataclass, replace

from fc_eval.codec.peers.table import PEERS, PeerFormat
from fc_eval.errors import FcEvalError, unknown
from fc_eval.wire.format import FORMATS, GroupSize, WireFormat, parse_format


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm needs: which stages quantize, whether it is told the ranks of a node, whose formats it has."""

    quantized: bool
    has_gather: bool
    needs_node_size: bool = False
    peers: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "two_step": Algorithm(quantized=True, has_gather=True),
    "one_step": Algorithm(quantized=True, has_gather=False),
    "ring": Algorithm(quantized=True, has_gather=True),
    "hierarchical": Algorithm(quantized=True, has_gather=True, needs_node_size=True),
    "fp32_ordered": Algorithm(quantized=False, has_gather=False),
    "plain": Algorithm(quantized=False, has_gather=False),
    "peer": Algorithm(quantized=True, has_gather=False, peers=True),
}


@dataclass(frozen=True)
class Comm:
    """One way to all-reduce.

    Attributes:
        algorithm: a key of `ALGORITHMS` (two-step is called two-shot elsewhere).
        reduce: format of the reduce-scatter stage, None for the unquantized algorithms.
        gather: format of the all-gather stage, None where the algorithm has no such stage.
        node_size: ranks per node (`hierarchical` only).
        min_tokens: calls of fewer tokens are left unquantized, as serving systems quantize prefill only; 0 for none.
        peer: format of another system, which has rules of its own for all stages (`peer` only).

    Raises:
        FcEvalError: an unknown algorithm, or a format missing or given where the algorithm has no use for it.
    """

    algorithm: str
    reduce: WireFormat | None = None
    gather: WireFormat | None = None
    node_size: int | None = None
    min_tokens: int = 0
    peer: PeerFormat | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise unknown("algorithm", self.algorithm, ALGORITHMS)
        rule = ALGORITHMS[self.algorithm]
        for stage, fmt, wanted in (
            ("reduce", self.reduce, rule.quantized and not rule.peers),
            ("gather", self.gather, rule.quantized and rule.has_gather),
        ):
            if wanted and fmt is None:
                raise FcEvalError(f"{self.algorithm} needs a {stage} format, such as 'int4'")
            if not wanted and fmt is not None:
                why = (
                    "has one format of another system for all stages"
                    if rule.peers
                    else "does not quantize"
                    if not rule.quantized
                    else "sends each partial sum once and has no gather stage"
                )
                raise FcEvalError(f"{self.algorithm} {why}: leave out the {stage} format {fmt.name!r}")
        if rule.peers != (self.peer is not None):
            known = ", ".join(PEERS)
            raise FcEvalError(
                f"peer needs the format of another system: {known}"
                if rule.peers
                else f"{self.algorithm} cannot send the format of another system: leave it out, or use peer"
            )
        if self.min_tokens < 0:
            raise FcEvalError(f"min_tokens={self.min_tokens} is not possible: expected a number of tokens, or 0")
        if self.min_tokens and not rule.quantized:
            raise FcEvalError(f"{self.algorithm} does not quantize: leave out min_tokens={self.min_tokens}")
        if rule.needs_node_size and not (self.node_size and self.node_size > 0):
            raise FcEvalError(f"{self.algorithm} needs node_size, the number of ranks per node, at least 1")
        if not rule.needs_node_size and self.node_size is not None:
            raise FcEvalError(f"{self.algorithm} has no nodes: leave out node_size={self.node_size}")
        if (
            self.algorithm == "ring"
            and self.reduce
            and self.gather
            and self.reduce.group_size != self.gather.group_size
        ):
            # A ring's chunk is a run of blocks that is summed on the way and then gathered as it is.
            raise FcEvalError("ring needs the same group size in both stages: its chunks are whole blocks of both")

    @property
    def name(self) -> str:
        """Full name, which `parse_comm` reads back: 'two_step:int4-g128-asym/int8-g128-asym'."""
        formats = [f.name for f in (self.peer, self.reduce, self.gather) if f is not None]
        if len(formats) == 2 and formats[0] == formats[1]:
            formats = formats[:1]
        node = f"@{self.node_size}" if self.node_size is not None else ""
        return self.algorithm + node + (":" + "/".join(formats) if formats else "") + self._threshold

    @property
    def short_name(self) -> str:
        """Name without group sizes and defaults, for results: 'int4', 'int4_int8', 'one_step_int6-sym'."""
        if self.peer is not None:
            return self.peer.name + self._threshold
        formats = [
            "-".join(part for part in f.name.split("-") if part not in (f"g{f.group_size}", "asym"))
            for f in (self.reduce, self.gather)
            if f is not None
        ]
        prefix = [] if self.algorithm == "two_step" else [self.algorithm]
        return "_".join(prefix + list(dict.fromkeys(formats))) + self._threshold

    @property
    def label(self) -> str:
        """Short name for tables: 'INT4 g128', 'INT6 (INT4 reduce, INT8 gather) g128', 'one-step INT6 g32'."""
        threshold = f", {self.min_tokens}+ tokens" if self.min_tokens else ""
        if self.peer is not None:
            return self.peer.label + threshold
        if self.reduce is None:
            return {"fp32_ordered": "baseline (fp32 ordered)", "plain": "plain"}[self.algorithm]
        bases = [f.base.upper() for f in (self.reduce, self.gather) if f is not None]
        if len(set(bases)) == 1:
            text = bases[0]
        else:
            alias = "INT6 " if bases == ["INT4", "INT8"] else ""
            text = f"{alias}({bases[0]} reduce, {bases[1]} gather)"
        details = [f.name.removeprefix(f.base + "-").replace("-asym", "") for f in (self.reduce, self.gather) if f]
        text += " " + "/".join(dict.fromkeys(details)) + threshold
        node = f"@{self.node_size}" if self.node_size is not None else ""
        return text if self.algorithm == "two_step" else f"{self.algorithm.replace('_', '-')}{node} {text}"

    @property
    def _threshold(self) -> str:
        return f"+min{self.min_tokens}" if self.min_tokens else ""

    @property
    def formats(self) -> tuple[WireFormat | PeerFormat, ...]:
        """The formats that a codec must cover, none for the unquantized algorithms."""
        return tuple(dict.fromkeys(fmt for fmt in (self.peer, self.reduce, self.gather) if fmt is not None))

    @property
    def is_quantized(self) -> bool:
        """Whether anything is encoded at all."""
        return ALGORITHMS[self.algorithm].quantized

    def check_between_ranks(self) -> None:
        """Makes sure that real ranks can send what this comm sends.

        Raises:
            FcEvalError: it exists in emulation only.
        """
        if self.peer is not None:
            raise FcEvalError(
                f"{self.peer.name} is the all-reduce of another system, which exists in emulation only: use "
                "exec=emulated or reducer=gathered"
            )
        if any(fmt.hadamard for fmt in (self.reduce, self.gather) if fmt is not None):
            raise FcEvalError(
                f"{self.name} rotates whole rows, and real ranks hold parts of rows: rotation exists in emulation "
                "only; leave out '-had', or use reducer=gathered or exec=emulated"
            )

    def at(self, tokens: int) -> "Comm":
        """What a call of so many tokens does: this comm without its threshold, or `fp32_ordered` below that."""
        if not self.min_tokens:
            return self
        return replace(self, min_tokens=0) if tokens >= self.min_tokens else BASELINE

    def with_group(self, group_size: GroupSize) -> "Comm":
        """The same comm with another group size in every stage.

        Raises:
            FcEvalError: the comm does not quantize, or its groups are another system's.
        """
        if self.peer is not None:
            raise FcEvalError(f"the groups of {self.peer.name} are its system's own: leave out group_size={group_size}")
        if not self.is_quantized:
            raise FcEvalError(f"{self.algorithm} does not quantize: leave out group_size={group_size}")
        reduce, gather = (f.with_group(group_size) if f else None for f in (self.reduce, self.gather))
        return replace(self, reduce=reduce, gather=gather)


BASELINE = Comm("fp32_ordered")
# Ranks per node of a preset such as `hierarchical_int4`, whose name has no place for them.
PRESET_NODE_SIZE = 2
# Examples of every way to write a comm beside the names of formats, for the error that an unknown one gives.
_EXAMPLES = (*ALGORITHMS, "int4_int8", "one_step_int4", "ring_int4", "hierarchical_int4")


def parse_comm(text: str | Comm) -> Comm:
    """Reads a comm name of the form `[algorithm[@node_size]:]reduce[/gather][+minTOKENS]`; a `Comm` passes through.

    `int4` means two-step with INT4 in both stages; `int4_int8` is short for `int4/int8`, `ring_int4` for `ring:int4`,
    so that the name of every preset in `conf/comm` means here what it means there.

    Raises:
        FcEvalError: an unknown format or algorithm (with the nearest names), or a combination that is not possible.
    """
    if isinstance(text, Comm):
        return text
    text, min_tokens = _split_threshold(str(text).strip())
    head, colon, tail = text.partition(":")
    if not colon:
        head, tail = _split_short(head)
    algorithm, _, node = head.partition("@")
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    if node and not node.isdigit():
        raise FcEvalError(f"node size {node!r} in comm {text!r} is not a whole number: write hierarchical@4:int4")
    first, slash, second = tail.partition("/")
    if not slash:
        pair = first.split("_", 1)
        if len(pair) == 2 and all(p.partition("-")[0] in FORMATS for p in pair) and first not in FORMATS:
            first, second = pair
    if first and first.partition("-")[0] not in (*FORMATS, *PEERS) and not colon and not slash:
        raise unknown("comm", str(text), [*FORMATS, *PEERS, *_EXAMPLES], hint="`fc-eval formats` lists the formats")
    node_size = int(node) if node else None
    if ALGORITHMS[algorithm].peers:
        return Comm(algorithm, node_size=node_size, min_tokens=min_tokens, peer=peer_format(tail))
    reduce = stage_format(first) if first else None
    gather = stage_format(second) if second else (reduce if ALGORITHMS[algorithm].has_gather else None)
    return Comm(algorithm, reduce, gather, node_size, min_tokens)


def stage_format(text: str | WireFormat) -> WireFormat:
    """Reads the name of a format of one stage, as `parse_format`.

    Raises:
        FcEvalError: as there, or it is the name of another system's format, which is a comm of its own.
    """
    if text in PEERS:
        raise FcEvalError(
            f"{text} is the all-reduce of another system, emulated by value, and no format of one stage: "
            f"use it as a comm, as in comm={text}"
        )
    return parse_format(text)


def peer_format(name: str) -> PeerFormat:
    """The format of another system by name.

    Raises:
        FcEvalError: there is none of that name.
    """
    if name not in PEERS:
        raise unknown("format of another system", name, PEERS, hint="`fc-eval formats` lists them")
    return PEERS[name]


def _split_threshold(text: str) -> tuple[str, int]:
    """'int4+min64' is ('int4', 64)."""
    name, plus, tail = text.partition("+")
    found = re.fullmatch(r"min(\d+)", tail)
    if plus and found is None:
        raise FcEvalError(f"{plus + tail!r} of comm {text!r} is not possible: a threshold is written as in int4+min64")
    return name, int(found.group(1)) if found else 0


def _split_short(name: str) -> tuple[str, str]:
    """Algorithm and formats of a name without a colon: 'ring_int4' is ('ring', 'int4'), 'int4' ('two_step', 'int4')."""
    for algorithm, rule in ALGORITHMS.items():
        if name.partition("@")[0] == algorithm:
            return name, ""
        if name.startswith(f"{algorithm}_"):
            node = f"@{PRESET_NODE_SIZE}" if rule.needs_node_size else ""
            return algorithm + node, name.removeprefix(f"{algorithm}_")
    if name in PEERS:
        return "peer", name
    return "two_step", name
