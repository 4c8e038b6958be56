"""The native codecs as PyTorch operators `fc_eval::native_*`: they work under torch.compile and CUDA graphs.

Formats travel as plain integers (`native_extension.format_ints`). Kernels run on the current stream of the tensors'
device; nothing here waits for a device. Numbers of non-finite groups come back as int64 tensors on that device.
T tokens, H hidden, W ranks.
"""

from collections.abc import Sequence

import torch
from torch.library import custom_op

from fc_eval.codec.native_extension import extension, view_of

STAGES = 2  # reduce, gather


def _threads() -> int:
    return torch.get_num_threads()


def _aligned(wire: torch.Tensor) -> torch.Tensor:
    """Sections are read 16 bytes at a time: a slice of a larger buffer may have to be copied."""
    return wire if wire.data_ptr() % 16 == 0 else wire.clone()


def _count(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


@custom_op("fc_eval::native_encode", mutates_args=(), device_types="cpu")
def encode(x_TH: torch.Tensor, fmt: Sequence[int], nbytes: int, isa: str) -> torch.Tensor:
    """Wire bytes [nbytes] uint8 of `x_TH`; `nbytes` is the layout's, `isa` the CPU's instruction set ('' = best)."""
    module = extension("cpu")
    wire = torch.empty(nbytes, dtype=torch.uint8)
    module.encode(view_of(x_TH, module), tuple(fmt), view_of(wire, module), _threads(), isa)
    return wire


@custom_op("fc_eval::native_decode", mutates_args=(), device_types="cpu")
def decode(
    wire: torch.Tensor, fmt: Sequence[int], dtype: str, tokens: int, hidden: int, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [tokens, hidden] fp32, non-finite groups) of wire bytes encoded from `dtype` ('bf16', 'fp16', 'fp32')."""
    module = extension("cpu")
    out = torch.empty((tokens, hidden), dtype=torch.float32)
    wire = _aligned(wire)
    nonfinite = module.decode(
        view_of(wire, module), tuple(fmt), module.DTYPES[dtype], view_of(out, module), _threads(), isa
    )
    return out, _count(nonfinite)


@custom_op("fc_eval::native_round_trip", mutates_args=(), device_types="cpu")
def round_trip(x_TH: torch.Tensor, fmt: Sequence[int], isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [T, H] fp32, non-finite groups): `decode(encode(x))` without making the bytes."""
    module = extension("cpu")
    out = torch.empty(x_TH.shape, dtype=torch.float32)
    nonfinite = module.round_trip(view_of(x_TH, module), tuple(fmt), view_of(out, module), _threads(), isa)
    return out, _count(nonfinite)


@custom_op("fc_eval::native_all_reduce", mutates_args=(), device_types="cpu")
def all_reduce(
    partials_WTH: torch.Tensor, algorithm: str, reduce: Sequence[int], gather: Sequence[int], isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(reduced [T, H] in the dtype of the partials, non-finite groups [2]) in one pass over the partials.

    `algorithm` is 'two_step', 'one_step' or 'fp32_ordered'; formats of stages that it does not have are empty.
    """
    module = extension("cpu")
    out = torch.empty(partials_WTH.shape[1:], dtype=partials_WTH.dtype)
    nonfinite = module.all_reduce(
        view_of(partials_WTH, module),
        module.ALGORITHMS[algorithm],
        tuple(reduce),
        tuple(gather),
        view_of(out, module),
        _threads(),
        isa,
    )
    return out, torch.tensor(nonfinite, dtype=torch.int64)


@encode.register_kernel("cuda")
def _encode_cuda(x_TH: torch.Tensor, fmt: Sequence[int], nbytes: int, isa: str) -> torch.Tensor:
    module = extension("cuda")
    wire = x_TH.new_empty(nbytes, dtype=torch.uint8)
    module.encode(view_of(x_TH, module), tuple(fmt), view_of(wire, module), *_cuda_call(x_TH))
    return wire


@decode.register_kernel("cuda")
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
        module.DTYPES[dtype],
        view_of(out, module),
        view_of(nonfinite, module),
        *_cuda_call(wire),
    )
    return out, nonfinite.squeeze()


@round_trip.register_kernel("cuda")
def _round_trip_cuda(x_TH: torch.Tensor, fmt: Sequence[int], isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    module = extension("cuda")
    out = x_TH.new_empty(x_TH.shape, dtype=torch.float32)
    nonfinite = x_TH.new_zeros(1, dtype=torch.int64)
    module.round_trip(
        view_of(x_TH, module), tuple(fmt), view_of(out, module), view_of(nonfinite, module), *_cuda_call(x_TH)
    )
    return out, nonfinite.squeeze()


@all_reduce.register_kernel("cuda")
def _all_reduce_cuda(
    partials_WTH: torch.Tensor, algorithm: str, reduce: Sequence[int], gather: Sequence[int], isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    module = extension("cuda")
    out = partials_WTH.new_empty(partials_WTH.shape[1:])
    nonfinite = partials_WTH.new_zeros(STAGES, dtype=torch.int64)
    module.all_reduce(
        view_of(partials_WTH, module),
        module.ALGORITHMS[algorithm],
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


@encode.register_fake
def _encode_fake(x_TH: torch.Tensor, fmt: Sequence[int], nbytes: int, isa: str) -> torch.Tensor:
    return x_TH.new_empty(nbytes, dtype=torch.uint8)


@decode.register_fake
def _decode_fake(
    wire: torch.Tensor, fmt: Sequence[int], dtype: str, tokens: int, hidden: int, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return wire.new_empty((tokens, hidden), dtype=torch.float32), wire.new_empty((), dtype=torch.int64)


@round_trip.register_fake
def _round_trip_fake(x_TH: torch.Tensor, fmt: Sequence[int], isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    return x_TH.new_empty(x_TH.shape, dtype=torch.float32), x_TH.new_empty((), dtype=torch.int64)


@all_reduce.register_fake
def _all_reduce_fake(
    partials_WTH: torch.Tensor, algorithm: str, reduce: Sequence[int], gather: Sequence[int], isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return partials_WTH.new_empty(partials_WTH.shape[1:]), partials_WTH.new_empty(STAGES, dtype=torch.int64)
