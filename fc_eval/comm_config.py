"""The `comm` group of a configuration: a preset's keys and what was overridden. No tensor library."""

from dataclasses import dataclass

from fc_eval.collective.comm import ALGORITHMS, Comm, parse_comm, peer_format, stage_format
from fc_eval.wire.format import parse_group_size


@dataclass(frozen=True)
class CommConfig:
    """The `comm` group as composed: a preset and what was overridden; `build` makes the `Comm` of it.

    Attributes:
        algorithm: a key of `fc_eval.collective.comm.ALGORITHMS`.
        reduce: format name of the reduce stage, None for the unquantized algorithms; for `peer` another system's.
        gather: format name of the gather stage; None means that of `reduce` where the algorithm gathers.
        group_size: overrides the group size of both stages.
        node_size: ranks per node, for `hierarchical`.
        min_tokens: calls of fewer tokens are left unquantized.
    """

    algorithm: str = "two_step"
    reduce: str | None = None
    gather: str | None = None
    group_size: int | str | None = None
    node_size: int | None = None
    min_tokens: int = 0

    def build(self) -> Comm:
        """The comm that this describes.

        Raises:
            FcEvalError: an unknown name or an impossible combination.
        """
        peer = self.algorithm in ALGORITHMS and ALGORITHMS[self.algorithm].peers
        reduce = stage_format(self.reduce) if self.reduce and not peer else None
        gather = stage_format(self.gather) if self.gather else None
        if gather is None and self.algorithm in ALGORITHMS and ALGORITHMS[self.algorithm].has_gather:
            gather = reduce
        other = peer_format(self.reduce) if peer and self.reduce else None
        comm = Comm(self.algorithm, reduce, gather, self.node_size, self.min_tokens, other)
        return comm if self.group_size is None else comm.with_group(parse_group_size(self.group_size))


def named_comm(name: str) -> CommConfig:
    """What a comm's name says ('int4-g32-sym', 'ring:int4/int8'), as the keys of the group.

    Raises:
        FcEvalError: as `parse_comm`.
    """
    comm = parse_comm(name)
    reduce, gather = (None if fmt is None else fmt.name for fmt in (comm.peer or comm.reduce, comm.gather))
    gather = None if gather == reduce else gather
    return CommConfig(comm.algorithm, reduce, gather, node_size=comm.node_size, min_tokens=comm.min_tokens)
