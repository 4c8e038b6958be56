"""The native codecs as PyTorch operators `fc_eval::native_*`: they work under torch.compile and CUDA graphs.

They are defined with the low-level `torch.library.Library`, half as costly per call as `custom_op`: for a single token
the call is most of the time. Formats travel as plain integers (`native_extension.format_ints`). Kernels run on the
current stream of the tensors' device; nothing here waits for a device. Numbers of non-finite groups come back as int64
tensors on that device. T tokens, H hidden, W ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fc_eval.codec.native_extension import extension, number_of, view_of

STAGES = 2  # reduce, gather

_LIBRARY: Any = torch.library.Library("fc_eval", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("native_encode(Tensor x_TH, int[] fmt, SymInt nbytes, str isa) -> Tensor")
_LIBRARY.define(
    "native_decode(Tensor wire, int[] fmt, str dtype, SymInt tokens, SymInt hidden, str isa) -> (Tensor, Tensor)"
)
_LIBRARY.define("native_round_trip(Tensor x_TH, int[] fmt, str isa) -> (Tensor, Tensor)")
_LIBRARY.define(
    "native_all_reduce(Tensor partials_WTH, str algorithm, int[] reduce, int[] gather, str isa) -> (Tensor, Tensor)"
)


def _threads() -> int:
    return torch.get_num_threads()


def _aligned(wire: torch.Tensor) -> torch.Tensor:
    """Sections are read 16 bytes at a time: a slice of a larger buffer may have to be copied."""
    return wire if wire.data_ptr() % 16 == 0 else wire.clone()


def _count(value: int) -> torch.Tensor:
    return torch.full((), value, dtype=torch.int64)


def _encode_cpu(x_TH: torch.Tensor, fmt: Sequence[int], nbytes: int, isa: str) -> torch.Tensor:
    """Wire bytes [nbytes] uint8 of `x_TH`; `nbytes` is the layout's, `isa` the CPU's instruction set ('' = best)."""
    module = extension("cpu")
    wire = torch.empty(nbytes, dtype=torch.uint8)
    module.encode(view_of(x_TH, module), tuple(fmt), view_of(wire, module), _threads(), isa)
    return wire


def _decode_cpu(
    wire: torch.Tensor, fmt: Sequence[int], dtype: str, tokens: int, hidden: int, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [tokens, hidden] fp32, non-finite groups) of wire bytes encoded from `dtype` ('bf16', 'fp16', 'fp32')."""
    module = extension("cpu")
    out = torch.empty((tokens, hidden), dtype=torch.float32)
    wire = _aligned(wire)
    number = number_of("dtype", dtype, module.DTYPES)
    nonfinite = module.decode(view_of(wire, module), tuple(fmt), number, view_of(out, module), _threads(), isa)
    return out, _count(nonfinite)


def _round_trip_cpu(x_TH: torch.Tensor, fmt: Sequence[int], isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [T, H] fp32, non-finite groups): `decode(encode(x))` without making the bytes."""
    module = extension("cpu")
    out = torch.empty(x_TH.shape, dtype=torch.float32)
    nonfinite = module.round_trip(view_of(x_TH, module), tuple(fmt), view_of(out, module), _threads(), isa)
    return out, _count(nonfinite)


def _all_reduce_cpu(
    partials_WTH: torch.Tensor, algorithm: str, reduce: Sequence[int], gather: Sequence[int], isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(reduced [T, H] in the dtype of the partials, non-finite groups [2]) in one pass over the partials.

    `algorithm` is 'two_step', 'one_step' or 'fp32_ordered'; formats of stages that it does not have are empty.
    """
    module = extension("cpu")
    out = torch.empty(partials_WTH.shape[1:], dtype=partials_WTH.dtype)
    nonfinite = module.all_reduce(
        view_of(partials_WTH, module),
        number_of("algorithm", algorithm, module.ALGORITHMS),
        tuple(reduce),
        tuple(gather),
        view_of(out, module),
        _threads(),
        isa,
    )
    return out, torch.tensor(nonfinite, dtype=torch.int64)


def _encode_cuda(x_TH: torch.Tensor, fmt: Sequence[int], nbytes: int, isa: str) -> torch.Tensor:
    module = extension("cuda")
    wire = x_TH.new_empty(nbytes, dtype=torch.uint8)
    module.encode(view_of(x_TH, module), tuple(fmt), view_of(wire, module), *_cuda_call(x_TH))
    return wire


def _decode_cuda(
    wire: torch.Tensor, fmt: Sequence[int], dtype: str, tokens: int, hidden: int, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    module = extension("cuda")
    out = wire.new_empty((tokens, hidden), dtype=torch.float32)
    nonfinite = wire.new_zeros(1, dtype=torch.int64)
    wire = _aligned(wire)
    module.decode(
        view_of(wire, module),
        tuple(fmt),
        number_of("dtype", dtype, module.DTYPES),
        view_of(out, module),
        view_of(nonfinite, module),
        *_cuda_call(wire),
    )
    return out, nonfinite.squeeze()


def _round_trip_cuda(x_TH: torch.Tensor, fmt: Sequence[int], isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    module = extension("cuda")
    out = x_TH.new_empty(x_TH.shape, dtype=torch.float32)
    nonfinite = x_TH.new_zeros(1, dtype=torch.int64)
    module.round_trip(
        view_of(x_TH, module), tuple(fmt), view_of(out, module), view_of(nonfinite, module), *_cuda_call(x_TH)
    )
    return out, nonfinite.squeeze()


def _all_reduce_cuda(
    partials_WTH: torch.Tensor, algorithm: str, reduce: Sequence[int], gather: Sequence[int], isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    module = extension("cuda")
    out = partials_WTH.new_empty(partials_WTH.shape[1:])
    nonfinite = partials_WTH.new_zeros(STAGES, dtype=torch.int64)
    module.all_reduce(
        view_of(partials_WTH, module),
        number_of("algorithm", algorithm, module.ALGORITHMS),
        tuple(reduce),
        tuple(gather),
        view_of(out, module),
        view_of(nonfinite, module),
        *_cuda_call(partials_WTH),
    )
    return out, nonfinite


def _cuda_call(tensor: torch.Tensor) -> tuple[int, int]:
    """(device index, stream handle) that a kernel for this tensor is launched with."""
    return tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream


def _encode_fake(x_TH: torch.Tensor, fmt: Sequence[int], nbytes: int, isa: str) -> torch.Tensor:
    return x_TH.new_empty(nbytes, dtype=torch.uint8)


def _decode_fake(
    wire: torch.Tensor, fmt: Sequence[int], dtype: str, tokens: int, hidden: int, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return wire.new_empty((tokens, hidden), dtype=torch.float32), wire.new_empty((), dtype=torch.int64)


def _round_trip_fake(x_TH: torch.Tensor, fmt: Sequence[int], isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    return x_TH.new_empty(x_TH.shape, dtype=torch.float32), x_TH.new_empty((), dtype=torch.int64)


def _all_reduce_fake(
    partials_WTH: torch.Tensor, algorithm: str, reduce: Sequence[int], gather: Sequence[int], isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return partials_WTH.new_empty(partials_WTH.shape[1:]), partials_WTH.new_empty(STAGES, dtype=torch.int64)


_LIBRARY.impl("native_encode", _encode_cpu, "CPU")
_LIBRARY.impl("native_encode", _encode_cuda, "CUDA")
_LIBRARY.impl("native_decode", _decode_cpu, "CPU")
_LIBRARY.impl("native_decode", _decode_cuda, "CUDA")
_LIBRARY.impl("native_round_trip", _round_trip_cpu, "CPU")
_LIBRARY.impl("native_round_trip", _round_trip_cuda, "CUDA")
_LIBRARY.impl("native_all_reduce", _all_reduce_cpu, "CPU")
_LIBRARY.impl("native_all_reduce", _all_reduce_cuda, "CUDA")
torch.library.register_fake("fc_eval::native_encode", _encode_fake, lib=_LIBRARY)
torch.library.register_fake("fc_eval::native_decode", _decode_fake, lib=_LIBRARY)
torch.library.register_fake("fc_eval::native_round_trip", _round_trip_fake, lib=_LIBRARY)
torch.library.register_fake("fc_eval::native_all_reduce", _all_reduce_fake, lib=_LIBRARY)

encode = torch.ops.fc_eval.native_encode.default
decode = torch.ops.fc_eval.native_decode.default
round_trip = torch.ops.fc_eval.native_round_trip.default
all_reduce = torch.ops.fc_eval.native_all_reduce.default
