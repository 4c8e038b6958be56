"""Products of bf16 and fp16 where a CPU has no instructions for them: fp32 sums, rounded once."""

import pytest
import torch
from conftest import attach, random_values
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fc_eval.models import half_products as module
from fc_eval.models.half_products import half_products, multiplies_in_fp32

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["with instructions", "without"])
def lacking(request, monkeypatch):
    """A CPU that lacks the instructions, or has them, whatever this one is."""
    monkeypatch.setattr(module, "lacks_instructions", lambda dtype: request.param and dtype in HALVES)
    return request.param


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_fp32_sums_rounded_once(lacking, dtype):
    # 2^12 + 2^-12 - 2^12: only a sum kept in fp32 keeps the small term, and only in this order.
    x = torch.tensor([[64.0, 2.0**-6, -64.0]], dtype=dtype)
    w = torch.tensor([[64.0, 2.0**-6, 64.0], [1.0, 0.0, 0.0]], dtype=dtype)
    layer = nn.Linear(3, 2, dtype=dtype)
    layer.weight.data, layer.bias.data = w, torch.tensor([0.0, 1.0], dtype=dtype)
    with half_products(layer):
        found = layer(x)
    assert found.dtype == dtype
    if lacking:
        wide = functional.linear(x.float(), w.float(), layer.bias.float())
        assert torch.equal(found, wide.to(dtype))


@pytest.mark.parametrize(
    "product",
    [
        functional.linear,
        torch.matmul,
        torch.Tensor.matmul,
        torch.mm,
        torch.Tensor.mm,
        lambda a, b: torch.mm(a, b, out=torch.empty_like(a)),
        lambda a, b: a @ b.T,
        lambda a, b: torch.bmm(a[None], b.T[None])[0],
        lambda a, b: functional.linear(input=a, weight=b),
    ],
)
def test_every_way_to_multiply_is_meant(lacking, product):
    a, b = random_values(0, 48, 48, dtype="bfloat16"), random_values(1, 48, 48, dtype="bfloat16")
    wide = product(a.float(), b.float()).to(a.dtype)
    with half_products(nn.Linear(2, 2, dtype=torch.bfloat16)):
        found = product(a, b)
    assert found.dtype == a.dtype
    assert not lacking or torch.equal(found, wide)


def test_other_dtypes_and_other_operations_are_left_alone(lacking):
    x = random_values(2, 8, 8)
    outside = functional.linear(x, x), x + x
    with half_products(nn.Linear(2, 2, dtype=torch.bfloat16)):
        inside = functional.linear(x, x), x + x
    assert all(torch.equal(*pair) for pair in zip(inside, outside, strict=True))
    assert not multiplies_in_fp32(nn.Linear(2, 2))
    assert multiplies_in_fp32(nn.Linear(2, 2, dtype=torch.float16)) == lacking


def test_it_ends_with_the_block(lacking):
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ZeroDivisionError), half_products(model):
        raise ZeroDivisionError
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_model_that_communicates_multiplies_so_throughout(family_model, monkeypatch):
    """Every product of a forward pass, those of the split layers too: none is left that runs in bf16."""
    monkeypatch.setattr(module, "lacks_instructions", lambda dtype: True)
    model = family_model(dtype="bfloat16")
    ids = torch.arange(24)[None]
    with half_products(model), attach(model, "int4"), torch.inference_mode(), Counter() as counter:
        model(input_ids=ids, use_cache=False)
    assert counter.products
    assert counter.products.isdisjoint(HALVES)


class Counter(TorchDispatchMode):
    """The dtypes of all matrix products below every Python layer."""

    def __init__(self):
        super().__init__()
        self.products = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.linear):
            self.products.add(args[0].dtype)
        return func(*args, **(kwargs or {}))
