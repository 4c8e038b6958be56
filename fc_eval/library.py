"""The codec and the all-reduce as three functions for users of the library; names in, tensors out."""

import torch

from fc_eval.codec.base import DTYPE_NAMES
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.codec.select import get_codec
from fc_eval.collective.all_reduce import all_reduce as _all_reduce
from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.wire.format import WireFormat, parse_format


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPE_NAMES:
        raise FcEvalError(
            f"dtype {dtype} cannot be communicated: expected torch.bfloat16, torch.float16 or torch.float32"
        )


def encode(x: torch.Tensor, fmt: str | WireFormat, codec: str = "auto") -> torch.Tensor:
    """Encodes values into the bytes that travel (WIRE.md).

    Args:
        x: [..., H] in bf16, fp16 or fp32; leading dimensions are rows (tokens). Groups lie along the last one.
        fmt: a format name such as 'int4-g128', or a `WireFormat`.
        codec: 'auto', 'reference', 'cpu' or 'cuda'; all give the same bytes.

    Returns:
        uint8 [nbytes] on the device of `x`.

    Raises:
        FcEvalError: an unknown format, a dtype or device that the codec does not cover, or a scalar `x`.
    """
    fmt = parse_format(fmt)
    _check_dtype(x.dtype)
    if x.dim() < 1:
        raise FcEvalError("a scalar has no groups: expected values of shape [..., H]")
    chosen, _ = get_codec(codec, (fmt,), x.dtype, x.device)
    return chosen.encode(x.reshape(-1, x.shape[-1]), fmt)


def decode(
    wire: torch.Tensor, fmt: str | WireFormat, shape: tuple[int, ...], dtype: torch.dtype, codec: str = "auto"
) -> torch.Tensor:
    """Decodes wire bytes back into values.

    Args:
        wire: uint8 [nbytes] from `encode`.
        fmt: the format that it was encoded with.
        shape: the shape that was encoded, [..., H].
        dtype: the dtype that was encoded; the decoded fp32 values are rounded to it once.
        codec: as in `encode`.

    Returns:
        Values of `shape` and `dtype`.

    Raises:
        FcEvalError: the number of bytes is not that of the format and shape, or as in `encode`.
    """
    fmt = parse_format(fmt)
    _check_dtype(dtype)
    if len(shape) < 1:
        raise FcEvalError("a scalar has no groups: expected a shape [..., H]")
    chosen, _ = get_codec(codec, (fmt,), dtype, wire.device)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    values = chosen.decode(wire, fmt, (rows, shape[-1]), dtype).values
    return round_to_dtype(values, dtype).reshape(tuple(shape))


def all_reduce(partials_WTH: torch.Tensor, comm: str | Comm, codec: str = "auto") -> torch.Tensor:
    """The all-reduce of W partial sums, as W ranks would do it, in one process (WIRE.md, "Reduce").

    Args:
        partials_WTH: [W, T, H] in bf16, fp16 or fp32.
        comm: a comm name such as 'int4', 'int4_int8' or 'one_step:int6-g32', or a `Comm`.
        codec: as in `encode`.

    Returns:
        [T, H] in the same dtype: what every rank holds afterwards.

    Raises:
        FcEvalError: another shape or dtype, an unknown name, or a node size that does not divide W.
    """
    comm = parse_comm(comm)
    _check_dtype(partials_WTH.dtype)
    formats = tuple(f for f in (comm.reduce, comm.gather) if f is not None)
    chosen, _ = get_codec(codec, formats, partials_WTH.dtype, partials_WTH.device)
    return _all_reduce(partials_WTH, comm, chosen).values
