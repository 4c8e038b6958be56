"""The communicator of the fused kernel: inboxes of all ranks in GPU memory, and the call that goes through them.

Between processes each rank owns a slab that the others map (cudaIpc), or, where GPUs cannot reach each other's memory,
one in pinned memory of the host that all of them map (staged). Virtual ranks are all in one process on one device, and
one call is all of them. No torch tensor is ever shared: the slab has a size of its own, fixed at the start.
W ranks, T tokens, H hidden.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from fc_eval.codec.base import DTYPE_NAMES, StageFormats
from fc_eval.codec.native_extension import extension, format_ints, view_of
from fc_eval.codec.select import CodecUnavailable
from fc_eval.collective.ranks import Ranks
from fc_eval.errors import FcEvalError, LostProcessError, unknown

# The longest wait for another rank inside of one call, which ranks enter together but for the time they compute.
DEADLINE_S = 60.0
# Words in the native failure that say that another rank is gone or late, and not that the call was wrong.
_LOST = ("until the deadline", "had given up")
_STAGES = 2  # reduce, gather
TRANSPORTS = ("auto", "peer", "staged")


class NoPeerAccessError(FcEvalError):
    """The GPUs of two ranks cannot reach each other's memory; every rank raises it."""


class Communicator:
    """One rank's end of the fused all-reduce, or all ends of virtual ranks.

    Attributes:
        world_size: W, 2 to 8.
        id: what the operator `fc_eval::fused_all_reduce` knows it by.
        staged: whether what ranks send each other lies in pinned memory of the host.
    """

    def __init__(
        self,
        module: ModuleType,
        device: torch.device,
        world_size: int,
        rank: int,
        slots: int | None = None,
        first_epoch: int = 0,
        deadline_s: float = DEADLINE_S,
        staged: bool = False,
    ) -> None:
        if not 2 <= world_size <= module.MOST_RANKS:
            raise FcEvalError(f"the fused kernel has 2 to {module.MOST_RANKS} ranks, not {world_size}")
        self.module, self.device, self.world_size, self.rank = module, device, world_size, rank
        self.deadline_s, self.staged = deadline_s, staged
        self.is_virtual: bool = rank == module.VIRTUAL
        index = module.CPU_DEVICE if device.type == "cpu" else device.index
        slots = default_slots(device, world_size, self.is_virtual) if slots is None else slots
        self._native = module.Communicator(index, world_size, rank, slots, first_epoch, staged)
        self.id = next(_IDS)
        COMMUNICATORS[self.id] = self

    @classmethod
    def virtual(cls, world_size: int, device: torch.device, **options: Any) -> "Communicator":
        """W ranks in this process on one GPU; partial sums are [W, T, H], and so are results.

        Raises:
            CodecUnavailable: the CUDA extension is not built, or there is no GPU.
            FcEvalError: W is not 2 to 8.
        """
        module = extension("cuda")
        return cls(module, device, world_size, module.VIRTUAL, **options)

    @classmethod
    def between(cls, ranks: Ranks, device: torch.device, transport: str = "auto", **options: Any) -> "Communicator":
        """This process's end; all ranks of the group call this together, each with a GPU (several may share one).

        Every inbox of every pair is written and verified before this returns.

        Args:
            ranks: the group.
            device: the GPU of this rank.
            transport: 'peer' (GPUs write into each other's memory), 'staged' (into pinned memory of the host), or
                'auto': staged where there is no peer access, which is said.
            options: those of the class.

        Raises:
            FcEvalError: no CUDA extension or GPU on a rank; `NoPeerAccessError` where a rank cannot open another's
                memory, or what was written there is not what is read.
            LostProcessError: another rank has ended, or has not come in time.
        """
        if transport not in TRANSPORTS:
            raise unknown("transport", transport, TRANSPORTS)
        try:
            return cls._connected(ranks, device, staged=transport == "staged", **options)
        except NoPeerAccessError as reason:
            if transport != "auto":
                raise
            if ranks.rank == 0:
                print(f"the fused kernel goes through memory of the host: {reason}", file=sys.stderr, flush=True)
        return cls._connected(ranks, device, staged=True, **options)

    @classmethod
    def _connected(cls, ranks: Ranks, device: torch.device, staged: bool, **options: Any) -> "Communicator":
        # What goes wrong on one rank is told to all of them: none waits for a rank that has given up.
        said: object = b""
        communicator: Communicator | None = None
        try:
            communicator = cls(extension("cuda"), device, ranks.world_size, ranks.rank, staged=staged, **options)
        except (FcEvalError, CodecUnavailable, RuntimeError) as error:
            said = str(error)
        try:
            _all_fine(ranks, said, FcEvalError, "there is nothing to work with")
            assert communicator is not None
            failure = FcEvalError if staged else NoPeerAccessError
            handles = _all_fine(ranks, _tried(communicator._native.handle), failure, "memory cannot be shared")
            _all_fine(ranks, _tried(communicator._native.connect, handles), failure, "memory cannot be reached")
            communicator._native.write_patterns()
            ranks.gather(None)
            wrong = communicator._native.wrong_patterns()
            lies = [f"what rank {source} wrote ({count} vectors)" for source, count in enumerate(wrong) if count]
            said = f"does not read {' and '.join(lies)}" if lies else b""
            _all_fine(ranks, said, failure, "writes get lost")
        except BaseException:
            if communicator is not None:
                communicator.close()
            raise
        return communicator

    def why_not(self, comm: StageFormats, dtype: torch.dtype, hidden: int) -> str | None:
        """None where the kernel covers a comm for rows of `hidden` values, otherwise the reason in a few words."""
        return why_not_fused(self.module, comm, dtype, hidden)

    def all_reduce(
        self, partials: torch.Tensor, comm: StageFormats, blocks: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One launch on the current stream; may be captured in a CUDA graph.

        Args:
            partials: [T, H] of this rank, or [W, T, H] of virtual ranks, in bf16, fp16 or fp32, on the device.
            comm: two_step or one_step in formats that `why_not` has nothing against; the same on all ranks.
            blocks: thread blocks per rank, the same on all ranks; 0 for as many as the size needs and the GPU holds.

        Returns:
            (values of the same shape, the same bits on every rank; non-finite groups int64 [stages]: of this rank's
            partial sums and of the sums that it owns, or of all virtual ranks).

        Raises:
            FcEvalError: something that `why_not` names, or too many blocks.
            LostProcessError: an earlier call has failed; the communicator is of no use any more.
        """
        self.check()
        reason = self.why_not(comm, partials.dtype, partials.shape[-1])
        if reason is not None:
            raise FcEvalError(f"the fused kernel cannot do {comm.algorithm} of this call: {reason}")
        formats = [list(format_ints(f, self.module)) if f is not None else [] for f in (comm.reduce, comm.gather)]
        values, nonfinite = operator(partials.detach().contiguous(), self.id, comm.algorithm, *formats, blocks)
        return values, nonfinite[: 1 if comm.gather is None else _STAGES]

    def launch(
        self,
        partials: torch.Tensor,
        algorithm: str,
        reduce: Sequence[int],
        gather: Sequence[int],
        out: torch.Tensor,
        nonfinite: torch.Tensor,
        blocks: int = 0,
        **mischief: Any,
    ) -> None:
        """The bare call into given memory; `nonfinite` int64 [2] is added to.

        Raises:
            FcEvalError: the native code refuses it.
        """
        stream = 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream
        views = [view_of(tensor, self.module) for tensor in (partials, out, nonfinite)]
        code = self.module.ALGORITHMS[algorithm]
        formats = tuple(reduce), tuple(gather)
        try:
            self._native.all_reduce(views[0], code, *formats, *views[1:], blocks, self.deadline_s, stream, **mischief)
        except RuntimeError as error:
            raise FcEvalError(f"the fused all-reduce was not launched: {error}") from error

    def most_blocks(self, dtype: torch.dtype) -> int:
        """The most thread blocks per rank that a call may use."""
        return int(self._native.most_blocks(self.module.DTYPES[DTYPE_NAMES[dtype]]))

    @property
    def slab_bytes(self) -> int:
        """Bytes of GPU memory of each rank."""
        return int(self._native.slab_bytes)

    def check(self) -> None:
        """Makes sure that no call has failed so far, as far as the host can know without waiting for the device.

        Raises:
            LostProcessError: a rank has ended or is late; names rank, slot, phase and epoch.
            FcEvalError: ranks made different calls, or two streams use one communicator.
        """
        if failure := self._native.failure():
            text = f"the fused all-reduce was given up and its output is NaN: {failure}"
            raise (LostProcessError if any(words in failure for words in _LOST) else FcEvalError)(text)

    def close(self) -> None:
        """Frees the slab; the ranks must be through with their calls."""
        COMMUNICATORS.pop(self.id, None)
        self._native.close()


def default_slots(device: torch.device, world_size: int, is_virtual: bool) -> int:
    """As many blocks as a device holds at once, two per multiprocessor; a slab of 31 MiB at W = 2, 124 MiB at W = 8."""
    if device.type == "cpu":
        return 2
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return 2 * count // world_size if is_virtual else 2 * count


def why_not_fused(module: ModuleType, comm: StageFormats, dtype: torch.dtype, hidden: int) -> str | None:
    """None where the kernel covers a comm, otherwise the reason in a few words."""
    if comm.algorithm not in ("two_step", "one_step"):
        return f"{comm.algorithm} is not two_step or one_step"
    if dtype not in DTYPE_NAMES:
        return f"{dtype} is not bf16, fp16 or fp32"
    formats = [fmt for fmt in (comm.reduce, comm.gather) if fmt is not None]
    for fmt in formats:
        if fmt.metadata != "extremes":
            return f"{fmt.name} sends a rounded scale"
        if fmt.hadamard:
            return f"{fmt.name} rotates its rows"
        if reason := module.why_not_fused(format_ints(fmt, module)):
            return f"{fmt.name}: {reason}"
    if len({(fmt.kind, fmt.scheme) for fmt in formats}) > 1:
        return f"{' and '.join(fmt.name for fmt in formats)} have different schemes"
    sizes = [fmt.group_size for fmt in formats if fmt.group_size != "token"]
    if len(set(sizes)) > 1 and hidden % max(sizes):
        return f"groups of {min(sizes)} and {max(sizes)} in rows of {hidden}, which the larger does not divide"
    return None


def _tried(step: Callable[..., bytes | None], *arguments: Any) -> object:
    """What a native step gives, or its complaint."""
    try:
        return step(*arguments) or b""
    except RuntimeError as error:
        return str(error)


def _all_fine(ranks: Ranks, said: object, failure: type[FcEvalError], what: str) -> list[Any]:
    """What every rank has to say, all of it bytes; a text is a complaint, which every rank raises."""
    everyone = ranks.gather(said)
    for rank, word in enumerate(everyone):
        if not isinstance(word, bytes):
            raise failure(
                f"reducer=fused cannot work here, {what}: rank {rank}: {word}; use reducer=torch, which gives the same "
                "bits"
            )
    return everyone


# -- the operator ------------------------------------------------------------------------------------------------------

COMMUNICATORS: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_IDS = itertools.count(1)

_LIBRARY: Any = torch.library.Library("fc_eval", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "fused_all_reduce(Tensor partials, int communicator, str algorithm, int[] reduce, int[] gather, int blocks) "
    "-> (Tensor, Tensor)"
)


def _call(
    partials: torch.Tensor, communicator: int, algorithm: str, reduce: Sequence[int], gather: Sequence[int], blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    found = COMMUNICATORS.get(communicator)
    if found is None:
        raise FcEvalError("the communicator of the fused all-reduce is closed: make another one")
    out = torch.empty_like(partials)
    nonfinite = partials.new_zeros(_STAGES, dtype=torch.int64)
    found.launch(partials, algorithm, reduce, gather, out, nonfinite, blocks)
    return out, nonfinite


def _fake(
    partials: torch.Tensor, communicator: int, algorithm: str, reduce: Sequence[int], gather: Sequence[int], blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(partials), partials.new_empty(_STAGES, dtype=torch.int64)


_LIBRARY.impl("fused_all_reduce", _call, "CUDA")
_LIBRARY.impl("fused_all_reduce", _call, "CPU")  # kernels on simulated warps; the package itself has none there
torch.library.register_fake("fc_eval::fused_all_reduce", _fake, lib=_LIBRARY)
operator = torch.ops.fc_eval.fused_all_reduce.default
