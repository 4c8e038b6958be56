"""INT8 weights and activations: rows by hand and by a scalar oracle, exact sums, and layers that become INT8."""

import numpy as np
import pytest
import torch
from conftest import TINY_SHAPE, attach, logits, random_values
from torch import nn
from torch.nn import functional

from fc_eval.errors import FcEvalError
from fc_eval.models.tiny import tiny_model
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.sites import find_decoder
from fc_eval.weights import int8
from fc_eval.weights.int8 import EXACT_IN_FP32, MAX_FEATURES, codes_of_rows, int_product, product, quantize_rows
from fc_eval.weights.linear import W8A8Linear, keep_scales_, linears, quantize_

F32 = np.float32
TINIEST = 2.0**-133  # the smallest bf16

# Values, scale, codes.
BY_HAND = [
    ([127.0, -127.0, 1.0, 0.0], 1.0, [127, -127, 1, 0]),
    ([0.5, 1.5, 2.5, -0.5, -1.5, -127.0], 1.0, [0, 2, 2, 0, -2, -127]),  # ties go to the even code
    ([254.0, 3.0, -5.0, 1.0], 2.0, [127, 2, -2, 0]),
    ([0.0, -0.0, 0.0], 0.0, [0, 0, 0]),
    ([TINIEST, -TINIEST, 0.0], float(F32(TINIEST) / F32(127)), [127, -127, 0]),
    ([float("inf"), 1.0], float("nan"), [0, 0]),
    ([1.0, float("nan")], float("nan"), [0, 0]),
]


@pytest.mark.parametrize(("values", "scale", "codes"), BY_HAND)
def test_rows_by_hand(values, scale, codes):
    for dtype in (torch.bfloat16, torch.float32):
        found = quantize_rows(torch.tensor([values], dtype=dtype))
        assert found.codes.tolist() == [codes]
        np.testing.assert_array_equal(found.scale.numpy(), np.array([scale], F32))


def oracle_rows(x: np.ndarray) -> tuple[list[list[int]], list[np.float32]]:
    """Code by code, each operation rounded to fp32 on its own."""
    codes, scales = [], []
    for row in x.astype(F32):
        scale = F32(max(abs(value) for value in row)) / F32(127)
        scales.append(scale)
        codes.append([0 if scale == 0 else max(-127, min(127, round(float(value / scale)))) for value in row])
    return codes, scales


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_product_is_the_scalar_oracles(dtype):
    x, w = random_values(0, 3, 40, dtype=dtype) * 3, random_values(1, 5, 40, dtype=dtype)
    x[1] = 0
    (a, a_scale), (b, b_scale) = (oracle_rows(v.float().numpy()) for v in (x, w))
    expected = [
        [F32(sum(p * q for p, q in zip(a[t], b[n], strict=True))) * b_scale[n] * a_scale[t] for n in range(5)]
        for t in range(3)
    ]
    found = product(x, quantize_rows(w))
    assert found.dtype == x.dtype
    assert torch.equal(found, torch.tensor(np.array(expected)).to(x.dtype))


def test_a_code_is_half_a_step_off_at_most():
    x = random_values(2, 50, 64)
    found = quantize_rows(x)
    error = (found.codes.double() * found.scale.double()[:, None] - x.double()).abs()
    # Half a step, and the rounding of the division by the scale, whose quotient is at most 127: 127 * 2^-24.
    assert (error <= found.scale.double()[:, None] * (0.5 + 127 * 2.0**-24)).all()


@pytest.mark.parametrize("features", [1, 7, EXACT_IN_FP32, EXACT_IN_FP32 + 1, 5000])
def test_sums_are_exact_even_where_they_are_largest(features):
    generator = torch.Generator().manual_seed(features)
    a, b = (torch.randint(-127, 128, (4, features), generator=generator, dtype=torch.int8) for _ in range(2))
    a[0], b[0], b[1] = 127, 127, -127
    found = int_product(a, b)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), a.long() @ b.long().t())


def test_bounds_of_exactness_are_the_largest_ones():
    assert EXACT_IN_FP32 * 127**2 <= 2**24 < (EXACT_IN_FP32 + 1) * 127**2
    assert MAX_FEATURES * 127**2 <= 2**31 - 1 < (MAX_FEATURES + 1) * 127**2


@pytest.mark.parametrize("shape", [(1, 8, 8), (16, 24, 40), (17, 21, 13), (40, 100, 3)])
def test_what_is_padded_for_the_int8_product_of_a_gpu_is_cut_off_again(shape):
    tokens, features, outputs = shape
    generator = torch.Generator().manual_seed(tokens)
    # Up to 60, because a CPU without VNNI adds pairs in 16 bits: 2 * (60 + 128) * 60 fits.
    a, b = (torch.randint(-60, 61, (n, features), generator=generator, dtype=torch.int8) for n in (tokens, outputs))
    assert torch.equal(int8._int_mm(a, b).long(), a.long() @ b.long().t())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8, 8), (16, 24, 40), (17, 21, 13), (300, 5000, 64)])
def test_the_int8_product_of_a_gpu_is_the_cpus(shape):
    tokens, features, outputs = shape
    x, w = random_values(3, tokens, features, dtype="bfloat16"), random_values(4, outputs, features, dtype="bfloat16")
    expected, found = product(x, quantize_rows(w)), product(x.cuda(), quantize_rows(w.cuda()))
    assert torch.equal(found.cpu(), expected)


# -- layers -------------------------------------------------------------------------------------------------------


def test_a_layer_becomes_int8_in_place_with_its_hooks():
    layer = nn.Linear(12, 5).to(torch.bfloat16).requires_grad_(False)
    weight, bias = layer.weight.clone(), layer.bias.clone()
    x = random_values(5, 2, 3, 12, dtype="bfloat16")
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    quantize_(nn.ModuleDict({"layer": layer}))
    assert type(layer) is W8A8Linear
    assert layer.weight.dtype == torch.int8
    y = layer(x)
    assert seen[0] is y
    assert torch.equal(y, (product(x.view(6, 12), quantize_rows(weight)) + bias).view(2, 3, 5))
    # Two roundings to 8 bits of 12 terms each, about 1 / (127 * sqrt(12)) of the largest: a few per cent at most.
    assert (y - functional.linear(x, weight, bias)).norm() < 0.03 * y.norm()


def test_scales_that_were_kept_are_used_after_a_weight_is_split():
    layer = nn.Linear(8, 4, bias=False)
    whole = quantize_rows(layer.weight.detach())
    holder = nn.ModuleDict({"layer": layer})
    keep_scales_(holder)
    layer.weight = nn.Parameter(layer.weight[:, 4:].detach().clone())
    quantize_(holder)
    assert torch.equal(layer.weight, whole.codes[:, 4:])
    assert torch.equal(layer.rows.scale, whole.scale)
    assert torch.equal(layer.weight, codes_of_rows(layer.weight.float() * whole.scale[:, None], whole.scale))


def test_all_linear_layers_of_the_decoder_and_nothing_else():
    model = tiny_model(TINY_SHAPE, dtype=torch.bfloat16)
    quantize_(find_decoder(model))
    names = [name for name, module in model.named_modules() if isinstance(module, W8A8Linear)]
    assert names == [f"model.{name}" for name, _ in linears(find_decoder(model))]
    assert len(names) == 7 * TINY_SHAPE.layers
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("plan", ["row_only", "full"])
def test_each_rank_quantizes_its_own_slice_of_activations(plan, token_ids):
    model = tiny_model(TINY_SHAPE, dtype=torch.bfloat16)
    quantize_(find_decoder(model))
    name = "model.layers.0.mlp.down_proj"
    layer = model.get_submodule(name)
    with torch.inference_mode(), communicate(model, "fp32_ordered", 2, "reference", plan):
        x = random_values(6, 3, layer.in_features, dtype="bfloat16")
        found = layer(x)
    slices = zip(x.chunk(2, dim=1), layer.weight.chunk(2, dim=1), strict=True)
    expected = sum(product(part, layer.rows._replace(codes=codes)).float() for part, codes in slices)
    assert torch.equal(found, expected.to(torch.bfloat16))
    assert not torch.equal(found, layer(x))


def test_the_plans_give_the_same_bits(token_ids):
    model = tiny_model(TINY_SHAPE, "qwen2", dtype=torch.bfloat16)
    quantize_(find_decoder(model))
    found = []
    for plan in ("row_only", "full"):
        with communicate(model, "int4", 2, "reference", plan):
            found.append(logits(model, token_ids))
    assert torch.equal(*found)
    with attach(model, "int8"):
        assert not torch.equal(found[0], logits(model, token_ids))


class OtherLinear(nn.Linear):
    """A layer that someone else has quantized."""


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (OtherLinear(4, 4), r"^layer is a .*OtherLinear with a Parameter: weights=w8a8 quantizes plain linear layers"),
        (nn.Linear(4, 4, device="meta"), r"^the weight of layer is not in memory \(offloaded\)"),
        (nn.Linear(MAX_FEATURES + 1, 1), rf"^layer has {MAX_FEATURES + 1} input features: .* up to {MAX_FEATURES}$"),
    ],
    ids=["quantized before", "offloaded", "too wide"],
)
def test_layers_that_cannot_be_quantized_are_named(layer, message):
    with pytest.raises(FcEvalError, match=message):
        quantize_(nn.ModuleDict({"layer": layer}))
    assert not isinstance(layer, W8A8Linear)
