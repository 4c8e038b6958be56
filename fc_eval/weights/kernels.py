"""The arithmetic of `fc_eval.weights.int8` in two Triton kernels for GPUs, with the same bits.

The first reads each token once and writes its codes and its scale. The second multiplies codes tile by tile into int32,
on the tensor cores, and scales a tile before it leaves the registers, so the sums are never written. Rows may lie
anywhere (a slice of a longer row is not copied), values of a row one after the other.

Which tile is fastest depends on the sizes and the GPU: at the first call of each size class Triton times a few and
keeps the fastest. Sums are exact, so the choice changes no bit. A CUDA graph can hold a call whose sizes were tuned
before.

T tokens, K input features, N output features.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

from fc_eval.errors import FcEvalError

# A program of `_quantize` holds a row of up to so many values in registers; longer rows are read again, a piece a time.
_LONGEST_PIECE = 16384
# Up to how many tokens tiles are tuned together.
_SIZE_CLASSES = (16, 64, 256, 1024, 2**31 - 1)

# (rows, columns, depth) of a tile, warps, stages. Decoding waits for the weights: few rows, many programs. Triton waits
# for each step of an integer sum (only fp32 ones overlap, its WGMMAPipeline.cpp), so large products want either long
# steps or two programs on a multiprocessor, one of which works while the other waits.
_DECODE = ((16, 16, 512, 4, 4), (16, 32, 256, 4, 5), (16, 64, 256, 4, 4))
_SMALL = ((64, 32, 256, 4, 4), (64, 64, 128, 4, 5), (64, 128, 128, 4, 4))
_MIDDLE = ((64, 64, 128, 4, 5), (64, 128, 128, 4, 4), (128, 128, 128, 8, 3))
_LARGE = (
    (128, 128, 128, 8, 3),
    (64, 256, 64, 4, 4),
    (128, 256, 128, 8, 3),
    (128, 256, 128, 8, 4),
    (256, 128, 128, 8, 4),
)
_OF_CLASS = dict(zip(_SIZE_CLASSES, (_DECODE, _SMALL, _MIDDLE, (*_MIDDLE[:2], *_LARGE), _LARGE), strict=True))
# Small, for a first call that says whether Triton works at all.
TRIAL = _DECODE[1]


def _config(tile: tuple[int, ...]) -> triton.Config:
    rows, columns, depth, warps, stages = tile
    return triton.Config({"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)


_CONFIGS = {tile: _config(tile) for tiles in _OF_CLASS.values() for tile in tiles}


def _candidates(configs: Any, arguments: dict[str, Any], **_: Any) -> list[triton.Config]:
    """The tiles to be timed for a call whose sizes are new."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise FcEvalError(
            "an INT8 product of new sizes cannot be part of a CUDA graph, where its tiles cannot be timed: run the "
            "call once before it"
        )
    return [_CONFIGS[tile] for tile in _OF_CLASS[arguments["size_class"]]]


@triton.jit
def _code(x, divisor, usable):  # type: ignore[no-untyped-def]
    # Adding 1.5 * 2^23 leaves no bit for fractions: fp32 rounds to the nearest whole number, ties to even. Quotients by
    # a row's own scale are below 2^22, as this needs; those of unusable rows are not used.
    quotient = tl.div_rn(x, divisor)
    whole = (quotient + 12582912.0) - 12582912.0
    return tl.where(usable, tl.minimum(tl.maximum(whole, -127.0), 127.0), 0.0).to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(x, codes, scale, features, x_stride, PIECE: tl.constexpr, IN_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * features
    columns = tl.arange(0, PIECE)
    # Magnitudes compare as their bits do, with NaN above infinity: none gets lost in a maximum.
    values = tl.load(x + columns, mask=columns < features, other=0.0).to(tl.float32)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    if not IN_ONE:
        for start in range(PIECE, features, PIECE):
            piece = tl.load(x + start + columns, mask=start + columns < features, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(piece.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))
    found = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    found = tl.where(largest < 0x7F800000, found, float("nan"))
    tl.store(scale + row, found)
    usable = found > 0
    divisor = tl.where(usable, found, 1.0)
    tl.store(codes + columns, _code(values, divisor, usable), mask=columns < features)
    if not IN_ONE:
        for start in range(PIECE, features, PIECE):
            piece = tl.load(x + start + columns, mask=start + columns < features, other=0.0).to(tl.float32)
            tl.store(codes + start + columns, _code(piece, divisor, usable), mask=start + columns < features)


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=list(_CONFIGS.values()),
    key=["size_class", "outputs", "features"],
    prune_configs_by={"early_config_prune": _candidates},
    do_bench=lambda call, quantiles: do_bench(call, warmup=5, rep=20, quantiles=quantiles),
)
@triton.jit(do_not_specialize=["tokens", "size_class"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    w,
    w_scale,
    y,
    tokens,
    outputs,
    features,
    x_stride,
    w_stride,
    size_class,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Programs that run together share tiles of x and w in the L2 cache: eight tiles down, then the next column.
    down = tl.cdiv(tokens, ROWS)
    in_band = 8 * tl.cdiv(outputs, COLUMNS)
    first = tl.program_id(0) // in_band * 8
    high = tl.minimum(down - first, 8)
    inside = tl.program_id(0) % in_band
    rows = (first + inside % high) * ROWS + tl.arange(0, ROWS)
    columns = inside // high * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)

    # Past the last row and column the last one again: loads need no mask there, and what they give is not stored.
    x_row = tl.minimum(rows, tokens - 1).to(tl.int64)
    w_row = tl.minimum(columns, outputs - 1).to(tl.int64)
    x_tile = x + x_row[:, None] * x_stride + depth[None, :]
    w_tile = w + w_row[None, :] * w_stride + depth[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for start in range(0, features, DEPTH):
        a = tl.load(x_tile, mask=depth[None, :] < features - start, other=0)
        b = tl.load(w_tile, mask=depth[:, None] < features - start, other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        x_tile += DEPTH
        w_tile += DEPTH

    scaled = sums.to(tl.float32) * tl.load(w_scale + w_row)[None, :] * tl.load(x_scale + x_row)[:, None]
    place = y + rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(place, scaled.to(y.dtype.element_ty), mask=(rows < tokens)[:, None] & (columns < outputs)[None, :])


def quantize_rows(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [T, K] and scales fp32 [T], as `int8.quantize_rows` gives them."""
    tokens, features = x_TK.shape
    x_TK = _with_dense_rows(x_TK)
    codes_TK = torch.empty((tokens, features), dtype=torch.int8, device=x_TK.device)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TK.device)
    piece = min(triton.next_power_of_2(features), _LONGEST_PIECE)
    warps = min(max(piece // 512, 1), 16)
    _quantize[(tokens,)](
        x_TK, codes_TK, scale_T, features, x_TK.stride(0), PIECE=piece, IN_ONE=features <= piece, num_warps=warps
    )
    return codes_TK, scale_T


def product(
    x_TK: torch.Tensor, codes_NK: torch.Tensor, scale_N: torch.Tensor, tile: tuple[int, ...] | None = None
) -> torch.Tensor:
    """[T, N] in the dtype of `x_TK`: what `int8.product` computes.

    Args:
        x_TK: activations in bf16, fp16 or fp32.
        codes_NK: of the weight, int8.
        scale_N: of the weight's rows, fp32.
        tile: rows, columns, depth, warps and stages instead of the fastest known ones.

    Raises:
        FcEvalError: new sizes, while a CUDA graph is captured.
        ValueError: sizes or devices that do not fit: a kernel would read what is not theirs.
    """
    tokens, outputs = len(x_TK), len(codes_NK)
    if x_TK.shape[1] != codes_NK.shape[1] or len(scale_N) != outputs or codes_NK.dtype != torch.int8:
        raise ValueError(f"{tuple(x_TK.shape)} by {codes_NK.dtype} {tuple(codes_NK.shape)}, {len(scale_N)} scales")
    if not x_TK.device == codes_NK.device == scale_N.device:
        raise ValueError(f"activations on {x_TK.device}, codes on {codes_NK.device}, scales on {scale_N.device}")
    y_TN = x_TK.new_empty((tokens, outputs))
    if not tokens:
        return y_TN
    x_codes_TK, x_scale_T = quantize_rows(x_TK)
    codes_NK = _with_dense_rows(codes_NK)
    sizes = (tokens, outputs, x_TK.shape[1], x_codes_TK.stride(0), codes_NK.stride(0))
    size_class = next(limit for limit in _SIZE_CLASSES if tokens <= limit)
    kernel: Any = _multiply if tile is None else _multiply.fn
    settings = {} if tile is None else _config(tile).all_kwargs()

    def grid(chosen: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(tokens, chosen["ROWS"]) * triton.cdiv(outputs, chosen["COLUMNS"]),)

    kernel[grid](x_codes_TK, x_scale_T, codes_NK, scale_N.contiguous(), y_TN, *sizes, size_class, **settings)
    return y_TN


def _with_dense_rows(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(1) == 1 else values.contiguous()
