"""The Triton kernels of INT8 weights give the bits of the operations in torch: interpreted on a CPU, compiled on a GPU.

The interpreter rounds to bf16 in another way than a GPU, so there the outputs are fp16 and fp32.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from fc_eval.errors import FcEvalError
from fc_eval.weights.int8 import Rows, product, quantize_rows, torch_product

SIZES = [(1, 1, 1), (5, 7, 13), (17, 21, 300)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def tokens_of_all_kinds(tokens, features, dtype, device="cpu"):
    """Rows of magnitudes 1e-6 to 1e4; of five or more, one is zero and two hold a NaN or an infinity."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, features, generator=generator) * torch.logspace(-6, 4, tokens)[:, None]
    if tokens >= 5:
        x[1], x[2, 0], x[3, -1] = 0, torch.nan, torch.inf
    return x.to(dtype).to(device)


def weight_of(outputs, features, device="cpu"):
    generator = torch.Generator().manual_seed(outputs)
    return Rows(*(part.to(device) for part in quantize_rows(torch.randn(outputs, features, generator=generator))))


def same_bits(found, expected):
    return bool(
        torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(1), expected.nan_to_num(1))
    )


def differing_cases():
    """Run with TRITON_INTERPRET=1: the sizes and dtypes in which a kernel gives other bits."""
    from fc_eval.weights import kernels

    wrong = []
    for dtype in (torch.float16, torch.float32):
        for tokens, outputs, features in SIZES:
            x, w = tokens_of_all_kinds(tokens, features, dtype), weight_of(outputs, features)
            codes, scale = kernels.quantize_rows(x)
            rows = quantize_rows(x)
            fine = torch.equal(codes, rows.codes) and same_bits(scale, rows.scale)
            if not fine or not same_bits(kernels.product(x, *w, tile=kernels.TRIAL), torch_product(x, *w)):
                wrong.append((dtype, tokens, outputs, features))
    return wrong


def test_interpreted_kernels_give_the_bits_of_torch():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with torch's builds for CUDA")
    script = "import test_w8a8_kernels as t; print(t.differing_cases())"
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stdout + ran.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*SIZES, (64, 128, 4096), (129, 100, 17000), (1100, 257, 511)])
def test_compiled_kernels_give_the_bits_of_torch_and_of_the_cpu(sizes, dtype):
    from fc_eval.weights import kernels

    tokens, outputs, features = sizes
    x, w = tokens_of_all_kinds(tokens, features, DTYPES[dtype], "cuda"), weight_of(outputs, features, "cuda")
    found = kernels.product(x, *w, tile=kernels.TRIAL)
    assert same_bits(found, torch_product(x, *w))
    assert same_bits(found.cpu(), product(x.cpu(), Rows(*(part.cpu() for part in w))))


@pytest.mark.gpu
def test_a_graph_holds_a_product_whose_sizes_are_known_and_refuses_others():
    x, w = tokens_of_all_kinds(64, 512, torch.bfloat16, "cuda"), weight_of(128, 512, "cuda")
    other = weight_of(136, 512, "cuda")
    product(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(x, w)
    x.copy_(x.flip(0))
    graph.replay()
    assert same_bits(captured, torch_product(x, *w))
    with (
        pytest.raises(FcEvalError, match="new sizes cannot be part of a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        product(x, other)
