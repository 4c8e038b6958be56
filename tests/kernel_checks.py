"""The Triton kernels of INT8 products beside the same arithmetic in torch; as a script under Triton's interpreter."""

import sys

import torch

from fc_eval.weights import kernels
from fc_eval.weights.int8 import Rows, quantize_rows, torch_product

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tokens, input features, outputs; more than 16384 features are read in pieces.
SHAPES = [(1, 1, 1), (1, 64, 8), (17, 21, 13), (5, 300, 33), (130, 144, 40), (129, 4096, 130), (3, 16500, 19)]
NO_LOOPS = 77


def activations(tokens: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    """Random, with rows of zeros, of a NaN, of infinity, of values near the smallest and of one far larger."""
    generator = torch.Generator().manual_seed(tokens + features)
    x = (3 * torch.randn(tokens, features, generator=generator)).to(dtype)
    special = [x * 0, x * torch.nan, x * torch.inf, x * torch.finfo(dtype).tiny, x * 2.0**-140, x.cummax(0).values * 50]
    for row, values in enumerate(special):
        if row + 1 < tokens:
            x[row + 1, : features - row % 2] = values[row + 1, : features - row % 2]
    return x


def weight_of(outputs: int, features: int, dtype: torch.dtype) -> Rows:
    generator = torch.Generator().manual_seed(outputs)
    return quantize_rows(torch.randn(outputs, features, generator=generator).to(dtype))


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all values have the same bits, where any NaN is as good as another."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    as_ints = {2: torch.int16, 4: torch.int32}[found.element_size()]
    equal = found.view(as_ints) == expected.view(as_ints)
    return bool((equal | (found.isnan() & expected.isnan())).all())


def check_rows(x: torch.Tensor) -> None:
    codes, scale = kernels.quantize_rows(x)
    expected = quantize_rows(x)
    assert torch.equal(codes, expected.codes)
    assert same_bits(scale, expected.scale)


def interpreted() -> None:
    tile = (16, 32, 64, 4, 2)
    for dtype in DTYPES:
        for tokens, features, outputs in SHAPES[:5]:
            x, weight = activations(tokens, features, dtype), weight_of(outputs, features, dtype)
            check_rows(x)
            if dtype != torch.bfloat16:  # the interpreter cuts bits off where it should round to bf16
                assert same_bits(kernels.product(x, *weight, tile=tile), torch_product(x, *weight))
    check_rows(activations(2, SHAPES[-1][1], torch.bfloat16))

    x, weight = activations(9, 96, torch.float32), weight_of(7, 96, torch.float32)
    for part in (slice(0, 32), slice(32, 96)):  # a rank's part of longer rows
        found = kernels.product(x[:, part], weight.codes[:, part], weight.scale, tile=tile)
        assert same_bits(found, torch_product(x[:, part], weight.codes[:, part], weight.scale))
    assert kernels.product(x[:0], *weight).shape == (0, 7)
    for wrong in [(x[:, 1:], *weight), (x, weight.codes, weight.scale[1:]), (x, weight.codes.int(), weight.scale)]:
        try:
            kernels.product(*wrong, tile=tile)
        except ValueError:
            continue
        raise AssertionError("sizes that do not fit were taken")


if __name__ == "__main__":
    try:
        interpreted()
    except Exception as error:
        if "only 0-dimensional arrays can be converted" not in str(error):
            raise
        print(error)
        sys.exit(NO_LOOPS)
