"""Microscaling formats against definitions made elsewhere: the types of `ml_dtypes` and of torch, where they agree.

They agree on every finite scale and element. They differ, and are left out, where `ml_dtypes` keeps the sign of a zero,
and where it has no saturation: values are saturated before its cast.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from native_cases import beside_extremes

from fc_eval.codec.power_of_two import scale_codes, scales_of, shared_scale
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.wire import parse_format
from fc_eval.wire.layout import layout

CODEC = ReferenceCodec()
ELEMENTS = {
    "mxfp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8),
    "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 15),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 4),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 2),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 6.0, 2),
}


def e8m0_of(amax: np.ndarray, emax: int) -> np.ndarray:
    """The scale of a block by the OCP rule: the largest power of two in it, divided by the largest of the element."""
    largest_power = 2.0 ** np.floor(np.log2(amax.astype(np.float64)))
    return np.maximum(largest_power / 2.0**emax, 2.0**-127).astype(np.float32).astype(ml_dtypes.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_16_bit_value_equals_ml_dtypes(name, dtype):
    element, largest, emax = ELEMENTS[name]
    x = beside_extremes(dtype)
    x = x[x.isfinite().all(1) & (x != 0).any(1)]
    groups = x.float().numpy()
    scales = e8m0_of(np.abs(groups).max(1, keepdims=True), emax)
    quotients = groups.astype(np.float64) / scales.astype(np.float64)  # exact: the divisor is a power of two
    elements = np.clip(quotients, -largest, largest).astype(np.float32).astype(element)
    expected = elements.astype(np.float32) * scales.astype(np.float32) + np.float32(0)
    fmt = parse_format(f"{name}-g8")
    assert np.array_equal(CODEC.round_trip(x, fmt).values.numpy(), expected)

    blocks = CODEC.encode(x, fmt).view(-1, layout(fmt, *x.shape, "bf16").block_bytes)
    section = layout(fmt, *x.shape, "bf16").section("scale8")
    codes = blocks[:, section.offset : section.offset + section.payload_bytes].flatten()[: len(x)]
    assert np.array_equal(codes.numpy(), scales.view(np.uint8).flatten())
    if name.startswith("mxfp8"):
        plane = blocks[:, :1024].view(-1, 32, 4, 8).transpose(1, 2).reshape(-1, 8)[: len(x)].numpy()
        nonzero = elements.astype(np.float32) != 0
        assert np.array_equal(plane[nonzero], elements.view(np.uint8)[nonzero])


@pytest.mark.parametrize("base", ["mxfp4", "mxint8"])
def test_scale_codes_are_e8m0(base):
    fmt, codes = parse_format(base), torch.arange(256, dtype=torch.uint8)
    scales = scales_of(codes, fmt)
    assert np.array_equal(scales.numpy(), codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32), True)
    assert torch.equal(scales.nan_to_num(7.0), codes.view(torch.float8_e8m0fnu).float().nan_to_num(7.0))
    assert torch.equal(scale_codes(scales, fmt), codes)
    powers = np.ldexp(np.float32(1), np.arange(-127, 128))
    assert np.array_equal(
        scale_codes(torch.from_numpy(powers), fmt), powers.astype(ml_dtypes.float8_e8m0fnu).view("u1")
    )


@pytest.mark.parametrize("width", [4, 5, 6, 7, 8])
def test_scales_saturate_at_their_width(width):
    """All ones stays free for NaN; a group of zeros has code 0 like the smallest scale."""
    fmt, limit = parse_format(f"mxint8-e{width}m0"), 2 ** (width - 1) - 1
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-limit, 1.0, 2.0**limit, 3e38, float("inf"), float("nan")])
    expected = [0, 0, 0, limit, 2 * limit, 2 * limit, 2 * limit + 1, 2 * limit + 1]
    assert scale_codes(shared_scale(amax, fmt), fmt).tolist() == expected
