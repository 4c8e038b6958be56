"""The check of a split allows what rounding does to this very model, and no wrong split."""

import pytest
import rank_parts
import torch
from conftest import TINY_SHAPE, local_config
from rank_group import shared_group

from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig, TinySpec
from fc_eval.models.tiny import byte_tokenizer
from fc_eval.parallel import row_parallel
from fc_eval.parallel.self_check import (
    DRAWS,
    LARGEST_BOUND,
    Otherwise,
    rounding_bound,
    self_check,
)
from fc_eval.quantized import load

DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj"


def model_with(weight: float | None, layer: str, dtype: str):
    """A tiny model, one of whose weights is this."""
    model = load(ModelConfig("checked", tiny=TinySpec(), shape=TINY_SHAPE, dtype=dtype), "cpu").model
    if weight is not None:
        model.get_submodule(layer).weight.data[3, 5] = weight
    return model


def slice_twice(monkeypatch, layer: torch.nn.Linear) -> None:
    """Rank 1 multiplies rank 0's slice of one layer."""
    own = row_parallel.partial_sums

    def wrong(x_TK, weight, world_size, contiguous=False):
        partials_WTH = own(x_TK, weight, world_size, contiguous)
        if weight is layer.weight:
            partials_WTH[1] = partials_WTH[0]
        return partials_WTH

    monkeypatch.setattr(row_parallel, "partial_sums", wrong)


@pytest.mark.parametrize(
    ("layer", "dtype", "weight", "plan"),
    [
        (DOWN, "bf16", 1e4, "row_only"),
        (UP, "fp16", 1e4, "row_only"),
        (UP, "fp16", 1e4, "full"),
        (UP, "fp32", 1e6, "full"),
        (DOWN, "bf16", None, "row_only"),
    ],
)
def test_a_right_split_passes_with_one_huge_weight_too(layer, dtype, weight, plan):
    check = self_check(model_with(weight, layer, dtype), 2, "reference", plan)
    assert 0 < check.relative_error <= check.bound


@pytest.mark.parametrize("target", [DOWN, "model.layers.0.self_attn.o_proj"])
@pytest.mark.parametrize(("dtype", "weight"), [("fp32", 1e4), ("bf16", 1e2), ("bf16", None)])
def test_a_wrong_split_of_one_layer_is_refused_with_one_huge_weight_too(target, dtype, weight, monkeypatch):
    model = model_with(weight, UP, dtype)
    slice_twice(monkeypatch, model.get_submodule(target))
    with pytest.raises(FcEvalError, match="the split model does not compute what the unsplit"):
        self_check(model, 2, "reference", "row_only")


@pytest.mark.parametrize(
    ("dtype", "terms", "off"), [("bfloat16", 99, 2**-8), ("float16", 9, 2**-11), ("float32", 16, 2**-22)]
)
def test_products_are_off_by_what_rounding_does_in_all_rows_but_the_first(dtype, terms, off):
    product = torch.randn(1 + DRAWS, 8, 96, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    for shape in (product.shape, (-1, 96)):
        found = Otherwise()(product.view(shape), terms).view(product.shape)
        assert found.dtype == product.dtype
        assert torch.equal(found[0], product[0])
        relative = ((found.double() - product.double()) / product.double()).flatten()[8 * 96 :]
        # A change of one unit roundoff is rounded to none or to one unit in the last place, which is up to two of them.
        assert relative.abs().max() <= 2 * off
        assert 0.5 * off < relative.abs().mean() < 1.5 * off
        assert abs(relative.sign().mean()) < 0.1  # random signs of 3072 values: 0.02 expected


@pytest.mark.parametrize(("dtype", "weight"), [("fp32", 1e4), ("fp16", 300.0), ("bf16", 80.0)])
def test_partial_sums_that_cancel_are_rounded_by_their_own_size(dtype, weight):
    model = model_with(None, DOWN, dtype)
    mlp, half = model.get_submodule("model.layers.1.mlp"), TINY_SHAPE.intermediate // 2
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight.data[half:] = projection.weight.data[:half]
    mlp.down_proj.weight.data[:, 5], mlp.down_proj.weight.data[:, 5 + half] = weight, -weight
    check = self_check(model, 2, "reference", "row_only")
    # The sum of the two is about 0, so that errors relative to it alone would be far below what is found.
    assert torch.finfo(model.dtype).eps * 4 < check.relative_error <= check.bound < LARGEST_BOUND


def test_a_bound_is_never_so_large_that_no_split_could_be_wrong():
    assert rounding_bound(1e-3) == 3e-3
    assert rounding_bound(1e-3, slack=3.0) == pytest.approx(9e-3)  # one product more
    assert rounding_bound(0.9) == LARGEST_BOUND


@pytest.mark.parametrize("wrong", [False, True])
def test_real_ranks_with_one_huge_weight_are_refused_when_their_split_is_wrong_alone(wrong, tmp_path):
    model = model_with(1e4, UP, "fp16")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for text, found in shared_group().run(2, rank_parts.loaded, local_config(tmp_path, dtype="fp16"), wrong):
        if wrong:
            assert text.startswith("FcEvalError: the split model does not compute what the unsplit one does")
        else:
            assert text == "nothing"
            assert 0 < found.relative_error <= found.bound < LARGEST_BOUND
