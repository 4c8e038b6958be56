"""Rows as INT8 codes with one scale each, and the exact product of two such matrices: the arithmetic of W8A8.

    scale = max |row| / 127                              fp32, one division; of a row with a NaN or an Inf: NaN
    code  = round(value / scale), clamped to -127..127   int8, ties to even; 0 where the scale is 0 or NaN
    y     = fp32(sum of code * code) * scale of the weight's row * scale of the token's row

Symmetric, no zero point, and -128 is never used: the quantizers of SmoothQuant (arXiv 2211.10438, section 2, and the
`fake_quant.py` of its repository), which floors scales at 1e-5 / 127 where a scale of 0 here makes a row of zeros.
The sum is exact in int32; it is rounded once to fp32, then each factor rounds once, then the result is rounded to the
activations' dtype. So the numbers depend neither on the order of the sum nor on the device, nor on whether a GPU
computes them in operations of torch or in the kernels of `fc_eval.weights.kernels`, which it does where it can.

T tokens, K input features, N output features.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from fc_eval.errors import FcEvalError

LARGEST = 127
# |sum| <= K * 127^2, which an int32 holds up to K = 133144.
MAX_FEATURES = (2**31 - 1) // LARGEST**2
# fp32 adds whole numbers without rounding up to 2^24: every sum of so many products, in whatever order.
EXACT_IN_FP32 = 2**24 // LARGEST**2
# torch._int_mm on a GPU takes more than 16 rows, and multiples of 8 of everything else (cuBLASLt).
_MIN_ROWS, _MULTIPLE = 17, 8
# Of a GPU that Triton compiles INT8 products for.
_LEAST_CAPABILITY = (8, 0)


class Rows(NamedTuple):
    """A matrix in INT8: `codes` int8 [R, K], and `scale` fp32 [R], what a code of 1 stands for in each row."""

    codes: torch.Tensor
    scale: torch.Tensor


def scale_of_rows(x_RK: torch.Tensor) -> torch.Tensor:
    """fp32 [R]: the scale of each row of values in bf16, fp16 or fp32."""
    largest_R = x_RK.abs().amax(-1).float()
    # By a tensor: on a GPU torch divides by a Python number as a product with its rounded reciprocal.
    return torch.where(
        largest_R < torch.inf, largest_R / torch.full_like(largest_R, LARGEST), torch.nan
    )  # NaN is not below infinity either


def codes_of_rows(x_RK: torch.Tensor, scale_R: torch.Tensor) -> torch.Tensor:
    """int8 [R, K]: the codes of rows under scales that were found before, of these or of longer rows."""
    usable_R = scale_R > 0
    divisor_R1 = torch.where(usable_R, scale_R, 1.0)[:, None]
    codes_RK = (x_RK.float() / divisor_R1).round_().clamp_(-LARGEST, LARGEST)
    return codes_RK.masked_fill_(~usable_R[:, None], 0.0).to(torch.int8)


def quantize_rows(x_RK: torch.Tensor) -> Rows:
    """Values [R, K] in bf16, fp16 or fp32 as INT8 rows."""
    scale_R = scale_of_rows(x_RK)
    return Rows(codes_of_rows(x_RK, scale_R), scale_R)


def int_product(a_TK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """int32 [T, N]: exact sums over K of two matrices of codes; K at most `MAX_FEATURES`.

    On a GPU the INT8 product of the tensor cores. On a CPU fp32 products of pieces of K in which fp32 is exact, added
    as integers: the INT8 products of CPU libraries add pairs in 16 bits where the CPU has no VNNI, and saturate there.
    """
    if a_TK.is_cuda:
        return _int_mm(a_TK, b_NK)
    sums_TN = torch.zeros(len(a_TK), len(b_NK), dtype=torch.int32, device=a_TK.device)
    for start in range(0, a_TK.shape[1], EXACT_IN_FP32):
        piece = slice(start, start + EXACT_IN_FP32)
        sums_TN += (a_TK[:, piece].float() @ b_NK[:, piece].float().t()).to(torch.int32)
    return sums_TN


def _int_mm(a_TK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """`torch._int_mm`, zeros added where its sizes demand it."""
    tokens, outputs = len(a_TK), len(b_NK)
    features = -a_TK.shape[1] % _MULTIPLE
    a_TK = functional.pad(a_TK, (0, features, 0, max(0, _MIN_ROWS - tokens)))
    b_NK = functional.pad(b_NK, (0, features, 0, -outputs % _MULTIPLE))
    return torch._int_mm(a_TK.contiguous(), b_NK.contiguous().t())[:tokens, :outputs]


def product(x_TK: torch.Tensor, weight: Rows) -> torch.Tensor:
    """[T, N] in the dtype of `x_TK`: activations, each token quantized by itself, times an INT8 weight [N, K].

    An operator, which a compiled model calls as it is: compiled divisions round otherwise.

    Raises:
        FcEvalError: called for the first time on a GPU, or with new sizes, while a CUDA graph is captured.
    """
    y_TN: torch.Tensor = _OPERATOR(x_TK, weight.codes, weight.scale)
    return y_TN


def torch_product(x_TK: torch.Tensor, codes_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    """What `product` gives, in operations of torch one after the other, on any device."""
    x = quantize_rows(x_TK)
    y_TN = int_product(x.codes, codes_NK).float()
    return y_TN.mul_(scale_N).mul_(x.scale[:, None]).to(x_TK.dtype)


def way_of_products(device: torch.device) -> str:
    """How `product` computes on a device, in words."""
    if device.type != "cuda":
        return "fp32 products of pieces, added as integers"
    why = why_no_kernels(device)
    return "Triton kernels" if why is None else f"torch._int_mm, since {why}"


@functools.lru_cache
def why_no_kernels(device: torch.device) -> str | None:
    """Why the kernels of `fc_eval.weights.kernels` are not used on a GPU, after a trial; None where they are.

    Raises:
        FcEvalError: asked for the first time while a CUDA graph is captured, where nothing can be tried.
    """
    if torch.cuda.is_current_stream_capturing():
        raise FcEvalError("the first INT8 product on a GPU cannot be part of a CUDA graph: run the call once before it")
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    x_TK = torch.linspace(-3, 3, 5 * 40, dtype=torch.float32, device=device).view(5, 40)
    try:
        from fc_eval.weights import kernels

        with torch.cuda.device(device):  # Triton launches on the current one
            found_TN = kernels.product(x_TK, *quantize_rows(x_TK), tile=kernels.TRIAL)
    except Exception as error:  # no Triton, no C compiler for its launcher, no folder for its cache, ...
        return f"Triton does not work here ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    right = torch.equal(found_TN, torch_product(x_TK, *quantize_rows(x_TK)))
    return None if right else "Triton's kernels give other values here"


# -- the operator -----------------------------------------------------------------------------------------------------


def _on_gpu(x_TK: torch.Tensor, codes_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    if why_no_kernels(x_TK.device) is not None:
        return torch_product(x_TK, codes_NK, scale_N)
    from fc_eval.weights import kernels

    with torch.cuda.device(x_TK.device):
        return kernels.product(x_TK, codes_NK, scale_N)


def _shape_only(x_TK: torch.Tensor, codes_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], codes_NK.shape[0]))


# The low-level interface, half as costly per call as `custom_op`.
_LIBRARY: Any = torch.library.Library("fc_eval", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("w8a8_product(Tensor x, Tensor codes, Tensor scale) -> Tensor")
_LIBRARY.impl("w8a8_product", torch_product, "CPU")
_LIBRARY.impl("w8a8_product", _on_gpu, "CUDA")
torch.library.register_fake("fc_eval::w8a8_product", _shape_only, lib=_LIBRARY)
_OPERATOR = torch.ops.fc_eval.w8a8_product.default
