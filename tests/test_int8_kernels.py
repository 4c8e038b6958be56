"""INT8 products in Triton kernels: the bits of the same arithmetic in torch, on GPUs and in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_values

from fc_eval.errors import FcEvalError
from fc_eval.weights import int8
from fc_eval.weights.int8 import Rows, product, quantize_rows, torch_product, way_of_products, why_no_kernels

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
GPU = torch.device("cuda", 0)


@needs_triton
def test_kernels_have_the_bits_of_torch_under_the_interpreter():
    script = Path(__file__).with_name("kernel_checks.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(f"this version of Triton interprets no loops under this version of NumPy ({done.stdout.strip()})")
    assert done.returncode == 0, done.stderr


def test_the_operator_is_known_to_compilers():
    x, weight = random_values(0, 5, 24, dtype="bfloat16"), quantize_rows(random_values(1, 7, 24, dtype="bfloat16"))
    torch.library.opcheck(int8._OPERATOR, (x, *weight), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda x: product(x, weight) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), torch_product(x, *weight) + 1)
    torch.compiler.reset()


def test_what_stands_against_kernels_is_said(monkeypatch):
    assert way_of_products(torch.device("cpu")) == "fp32 products of pieces, added as integers"
    asked = why_no_kernels.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert asked(GPU) == "the GPU is older than compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(FcEvalError, match="first INT8 product on a GPU cannot be part of a CUDA graph"):
        asked(GPU)


# -- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checks():
    """The checks of a GPU's kernels, where it has them."""
    why = why_no_kernels(GPU)
    if why is not None:
        pytest.skip(why)
    import kernel_checks

    return kernel_checks


def on_gpu(weight: Rows) -> Rows:
    return Rows(*(values.to(GPU) for values in weight))


@pytest.mark.gpu
def test_a_gpu_that_triton_knows_uses_its_kernels():
    if torch.cuda.get_device_capability(GPU) < (8, 0):
        pytest.skip("the GPU is older")
    assert way_of_products(GPU) == "Triton kernels"


@pytest.mark.gpu
def test_rows_of_every_16_bit_value_are_the_cpus(checks):
    for dtype in (torch.bfloat16, torch.float16):
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        x = torch.stack([values, values * 0.7, values.roll(7) * 0.3], 1)
        expected = quantize_rows(x)
        for found in (quantize_rows(x.to(GPU)), Rows(*checks.kernels.quantize_rows(x.to(GPU)))):
            assert checks.same_bits(found.scale.cpu(), expected.scale)
            assert torch.equal(found.codes.cpu(), expected.codes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_odd_shapes_have_the_bits_of_torch_and_of_the_cpu(checks, dtype):
    dtype = getattr(torch, dtype)
    for tokens, features, outputs in checks.SHAPES:
        x, weight = checks.activations(tokens, features, dtype), checks.weight_of(outputs, features, dtype)
        checks.check_rows(x.to(GPU))
        expected = torch_product(x, *weight)
        assert checks.same_bits(torch_product(x.to(GPU), *on_gpu(weight)).cpu(), expected)
        for tile in (checks.kernels.TRIAL, (128, 128, 128, 8, 3)):
            assert checks.same_bits(checks.kernels.product(x.to(GPU), *on_gpu(weight), tile=tile).cpu(), expected)


@pytest.mark.gpu
def test_every_tile_has_the_same_bits(checks):
    x, weight = (
        checks.activations(300, 1040, torch.bfloat16).to(GPU),
        on_gpu(checks.weight_of(272, 1040, torch.bfloat16)),
    )
    expected = torch_product(x, *weight)
    for tile in checks.kernels._CONFIGS:
        assert checks.same_bits(checks.kernels.product(x, *weight, tile=tile), expected), tile
    for tokens in (1, 17, 100, 300):  # tuned: a size class each
        assert checks.same_bits(product(x[:tokens], weight), expected[:tokens])


@pytest.mark.gpu
def test_parts_of_rows_are_multiplied_where_they_lie(checks):
    x, weight = checks.activations(33, 96, torch.bfloat16).to(GPU), on_gpu(checks.weight_of(48, 96, torch.bfloat16))
    for part in (slice(0, 32), slice(32, 96), slice(5, 91)):
        codes = weight.codes[:, part]
        expected = torch_product(x[:, part], codes, weight.scale)
        assert checks.same_bits(product(x[:, part], Rows(codes, weight.scale)), expected)
        assert checks.same_bits(product(x[:, part].contiguous(), Rows(codes.contiguous(), weight.scale)), expected)


@pytest.mark.gpu
def test_more_than_2_31_values_are_addressed(checks):
    if torch.cuda.mem_get_info(GPU)[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.zeros(2**31 // 8192 + 40, 8192, dtype=torch.bfloat16, device=GPU)
    x[-40:] = random_values(0, 40, 8192, dtype="bfloat16").to(GPU)
    weight = on_gpu(checks.weight_of(32, 8192, torch.bfloat16))
    found = checks.kernels.product(x, *weight, tile=checks.kernels.TRIAL)
    assert checks.same_bits(found[-40:], torch_product(x[-40:], *weight))
    assert not found[:-40].any()


@pytest.mark.gpu
def test_a_graph_replays_what_was_tuned_and_refuses_what_was_not(checks):
    x, weight = random_values(0, 40, 256, dtype="bfloat16").to(GPU), on_gpu(checks.weight_of(96, 256, torch.bfloat16))
    product(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x, weight)
    x.copy_(random_values(1, 40, 256, dtype="bfloat16"))
    graph.replay()
    assert torch.equal(found, torch_product(x, *weight))
    new = on_gpu(checks.weight_of(80, 256, torch.bfloat16))
    with (
        pytest.raises(FcEvalError, match="of new sizes cannot be part of a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        product(x, new)
    assert torch.equal(product(x, new), torch_product(x, *new))


@pytest.mark.gpu
def test_a_compiled_layer_has_the_bits_of_an_eager_one(checks):
    x, weight = random_values(0, 40, 256, dtype="bfloat16").to(GPU), on_gpu(checks.weight_of(96, 256, torch.bfloat16))
    compiled = torch.compile(lambda x: product(x, weight), fullgraph=True)
    assert torch.equal(compiled(x), torch_product(x, *weight))
    torch.compiler.reset()
