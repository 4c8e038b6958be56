"""The operations of a codec as calls on buffers that exist already, so that only the codec's own work is timed.

    encode    values [T, H]             -> wire bytes               qdq       values [T, H]        -> fp32 [T, H]
    decode    wire bytes                -> fp32 [T, H]              two_step  partials [W, T, H]   -> values [T, H]

The reference allocates its own temporaries and results, as it always does; native codecs write into given buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch

from fc_eval.codec.base import DTYPE_NAMES, Codec
from fc_eval.codec.native import NativeCodec
from fc_eval.codec.native_extension import extension, format_ints, view_of
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import Comm
from fc_eval.wire.format import WireFormat
from fc_eval.wire.layout import layout

# Written into every output before a call: a byte that no call has written shows.
POISON = 0xAB


@dataclass(frozen=True)
class Problem:
    """One operation on one size. `ranks` is None but for the emulated two-step all-reduce of W partial sums.

    `tokens` and `hidden` are those of the values, of one partial sum for a two-step.
    """

    op: str
    fmt: WireFormat
    tokens: int
    hidden: int
    dtype: torch.dtype
    ranks: int | None = None

    @property
    def name(self) -> str:
        """As in the `op` column: 'encode', 'decode', 'qdq', 'two_step_w8'."""
        return self.op if self.ranks is None else f"{self.op}_w{self.ranks}"

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of the values that a source is made from."""
        return (self.tokens, self.hidden) if self.ranks is None else (self.ranks, self.tokens, self.hidden)

    @property
    def comm(self) -> Comm:
        """The all-reduce of a two-step."""
        return Comm("two_step", self.fmt, self.fmt)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the message."""
        return layout(self.fmt, self.tokens, self.hidden, DTYPE_NAMES[self.dtype]).total_bytes

    def source(self, values: torch.Tensor, encoder: Codec) -> torch.Tensor:
        """What the operation reads: the values, or for a decode their wire bytes."""
        return encoder.encode(values, self.fmt) if self.op == "decode" else values

    def poisoned_output(self, device: torch.device) -> torch.Tensor:
        """A buffer of the shape and dtype of the result."""
        if self.op == "encode":
            out = torch.empty(self.wire_bytes, dtype=torch.uint8, device=device)
        else:
            dtype = self.dtype if self.op == "two_step" else torch.float32
            out = torch.empty((self.tokens, self.hidden), dtype=dtype, device=device)
        out.view(torch.uint8).fill_(POISON)
        return out


def result_of(codec: Codec, problem: Problem, source: torch.Tensor) -> torch.Tensor:
    """The operation through the interface that everything else uses; allocates its result."""
    match problem.op:
        case "encode":
            return codec.encode(source, problem.fmt)
        case "decode":
            return codec.decode(source, problem.fmt, (problem.tokens, problem.hidden), problem.dtype).values
        case "qdq":
            return codec.round_trip(source, problem.fmt).values
    return all_reduce(source, problem.comm, codec).values


def writes_into_buffers(codec: Codec, problem: Problem, device: torch.device) -> TypeGuard[NativeCodec]:
    """Whether `call_into` covers this: native codecs, and a two-step where it is a single call of the extension."""
    if not isinstance(codec, NativeCodec):
        return False
    return problem.op != "two_step" or codec.why_not_fused(problem.comm, problem.dtype, device) is None


def call_into(codec: NativeCodec, problem: Problem, source: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    """The operation as one call of the extension from `source` into `out`, on the current stream of a GPU."""
    module = extension(codec.name)
    ints, dtype = format_ints(problem.fmt, module), module.DTYPES[DTYPE_NAMES[problem.dtype]]
    views = view_of(source, module), view_of(out, module)
    # The closures below hold `source`, `out` and the counters: a view does not keep its tensor alive.
    alive = (source, out, torch.zeros(2, dtype=torch.int64, device=source.device))
    counters = alive[2][: 2 if problem.op == "two_step" else 1]

    def how(counts: bool) -> tuple[object, ...]:
        if codec.device_type == "cpu":
            return torch.get_num_threads(), ""
        stream = torch.cuda.current_stream(alive[0].device).cuda_stream
        return *((view_of(counters, module),) if counts else ()), alive[0].device.index, stream

    def encode() -> None:
        module.encode(views[0], ints, views[1], *how(counts=False))

    def decode() -> None:
        module.decode(views[0], ints, dtype, views[1], *how(counts=True))

    def qdq() -> None:
        module.round_trip(views[0], ints, views[1], *how(counts=True))

    def two_step() -> None:
        module.all_reduce(views[0], module.ALGORITHMS["two_step"], ints, ints, views[1], *how(counts=True))

    return {"encode": encode, "decode": decode, "qdq": qdq, "two_step": two_step}[problem.op]
