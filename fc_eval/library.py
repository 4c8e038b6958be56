"""The codec and the all-reduce as three functions for users of the library; names in, tensors out.

They may be called from compiled code, which then runs them eagerly: the bytes stay the same.
"""

import math
from collections.abc import Sequence
from numbers import Integral

import torch

from fc_eval.codec.base import DTYPE_NAMES
from fc_eval.codec.canonical import round_to_dtype
from fc_eval.codec.eager import eager
from fc_eval.codec.select import get_codec
from fc_eval.collective.all_reduce import all_reduce as _all_reduce
from fc_eval.collective.comm import Comm, parse_comm, stage_format
from fc_eval.errors import FcEvalError
from fc_eval.wire.format import WireFormat


@eager
def encode(x: torch.Tensor, fmt: str | WireFormat, codec: str = "auto") -> torch.Tensor:
    """Encodes values into the bytes that travel (WIRE.md). No gradient flows back.

    Args:
        x: [..., H] in bf16, fp16 or fp32, any strides; leading dimensions are rows (tokens), possibly none or empty.
            Groups lie along the last dimension. A group with a NaN or an Inf travels as NaN.
        fmt: a format name such as 'int4-g128', or a `WireFormat`.
        codec: 'auto', 'reference', 'cpu' or 'cuda'; all give the same bytes.

    Returns:
        uint8 [nbytes] on the device of `x`; 0 bytes for no rows.

    Raises:
        FcEvalError: an unknown format or codec, a dtype or device that the codec does not cover, no last dimension or
            an empty one, or something else than a dense tensor with data.
    """
    fmt = stage_format(fmt)
    _check_tensor("values", x)
    _check_dtype(x.dtype)
    hidden = _check_shape(x.shape)[-1]
    chosen, _ = get_codec(codec, (fmt,), x.dtype, x.device)
    return chosen.encode(x.reshape(-1, hidden), fmt)


@eager
def decode(
    wire: torch.Tensor, fmt: str | WireFormat, shape: Sequence[int], dtype: torch.dtype, codec: str = "auto"
) -> torch.Tensor:
    """Decodes wire bytes back into values.

    Args:
        wire: uint8 [nbytes] from `encode`.
        fmt: the format that it was encoded with.
        shape: the shape that was encoded, [..., H].
        dtype: the dtype that was encoded; the decoded fp32 values are rounded to it once.
        codec: as in `encode`.

    Returns:
        Values of `shape` and `dtype`, on the device of `wire`.

    Raises:
        FcEvalError: `wire` is not uint8 or has another number of bytes than the format and shape, or as in `encode`.
    """
    fmt = stage_format(fmt)
    _check_tensor("wire bytes", wire)
    _check_dtype(dtype)
    *rows, hidden = _check_shape(shape)
    chosen, _ = get_codec(codec, (fmt,), dtype, wire.device)
    values = chosen.decode(wire, fmt, (math.prod(rows), hidden), dtype).values
    return round_to_dtype(values, dtype).reshape(*rows, hidden)


@eager
def all_reduce(partials_WTH: torch.Tensor, comm: str | Comm, codec: str = "auto") -> torch.Tensor:
    """The all-reduce of W partial sums, as W ranks would do it, in one process (WIRE.md, "Reduce").

    Args:
        partials_WTH: [W, T, H] in bf16, fp16 or fp32, any strides; W and H at least 1. No gradient flows back.
        comm: a comm name such as 'int4', 'int4_int8' or 'one_step:int6-g32', or a `Comm`.
        codec: as in `encode`.

    Returns:
        [T, H] in the same dtype: what every rank holds afterwards. At W = 1 the one partial sum itself, not a copy.

    Raises:
        FcEvalError: another shape or dtype, an unknown name, or a node size that does not divide W.
    """
    comm = parse_comm(comm)
    _check_tensor("partial sums", partials_WTH)
    _check_dtype(partials_WTH.dtype)
    chosen, _ = get_codec(codec, comm.formats, partials_WTH.dtype, partials_WTH.device)
    return _all_reduce(partials_WTH, comm, chosen).values


def _check_tensor(what: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise FcEvalError(f"the {what} are a {type(x).__name__}: expected one torch.Tensor")
    if x.is_meta:
        raise FcEvalError(f"the {what} are on the meta device and have no data: expected a tensor in memory")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise FcEvalError(f"the {what} are a {kind} tensor: expected a dense one")


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise FcEvalError(
            f"dtype {dtype} cannot be communicated: expected torch.bfloat16, torch.float16 or torch.float32"
        )


def _check_shape(shape: object) -> tuple[int, ...]:
    given = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else None
    sizes = tuple(int(size) if isinstance(size, Integral) else -1 for size in given or ())
    if not sizes or min(sizes) < 0 or sizes[-1] < 1:
        text = repr(shape) if given is None else list(given)
        raise FcEvalError(f"values of shape {text} have no groups: expected whole numbers [..., H], H at least 1")
    return sizes
