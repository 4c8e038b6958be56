"""Small floats: the grid, ties to the even code, agreement with `ml_dtypes` and torch where the definitions agree."""

import ml_dtypes
import numpy as np
import oracle_floats
import pytest
import torch

from fc_eval.codec.minifloat import codes_of, magnitudes, round_to_grid_, values_of
from fc_eval.wire import MINIFLOATS

# 16-bit patterns as the high half of an fp32 number: every sign, exponent and leading mantissa.
HIGH_HALVES = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


def around_every_middle(element: str) -> np.ndarray:
    """Grid values, the middles between them and the fp32 neighbours of each, of both signs."""
    grid = np.array(oracle_floats.small_values(element), dtype=np.float32)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e9))])
    return np.concatenate([points, -points, np.float32([1e-45, -1e-45, 1e-39, -0.0])])


def in_range(x: np.ndarray, element: str) -> np.ndarray:
    return x[np.abs(x) <= MINIFLOATS[element].largest]


def rounded(x: np.ndarray, element: str) -> torch.Tensor:
    return round_to_grid_(torch.from_numpy(x.copy()), MINIFLOATS[element])


@pytest.mark.parametrize("element", sorted(MINIFLOATS))
def test_rounding_and_codes_equal_the_oracle(element):
    kind = MINIFLOATS[element]
    random = np.random.default_rng(0).standard_normal(2000).astype(np.float32) * np.float32(kind.largest / 3)
    x = in_range(np.concatenate([around_every_middle(element), random]), element)
    grid = rounded(x, element)
    codes = codes_of(grid, kind)
    assert codes.tolist() == [oracle_floats.small_code(value, element) for value in x]
    assert torch.equal(values_of(codes, kind).view(torch.int32), grid.view(torch.int32))  # a zero is +0 in both


@pytest.mark.parametrize("element", sorted(MINIFLOATS))
def test_magnitudes_are_those_of_the_definition(element):
    assert list(magnitudes(MINIFLOATS[element])) == oracle_floats.small_values(element)


@pytest.mark.parametrize(
    ("element", "other"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("e3m2", ml_dtypes.float6_e3m2fn),
        ("e2m3", ml_dtypes.float6_e2m3fn),
        ("e2m1", ml_dtypes.float4_e2m1fn),
    ],
)
def test_equals_ml_dtypes_up_to_the_largest_value(element, other):
    """Beyond it `ml_dtypes` gives NaN or Inf where WIRE.md saturates; it also keeps the sign of a zero."""
    x = in_range(np.concatenate([HIGH_HALVES, around_every_middle(element)]), element)
    assert np.array_equal(rounded(x, element).numpy(), x.astype(other).astype(np.float32))


@pytest.mark.parametrize(("element", "other"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_equals_torch_up_to_the_largest_value(element, other):
    x = in_range(np.concatenate([HIGH_HALVES, around_every_middle(element)]), element)
    assert torch.equal(rounded(x, element), torch.from_numpy(x).to(other).float())
    bits = torch.from_numpy(x).to(other).view(torch.uint8)
    zero = rounded(x, element) == 0
    assert torch.equal(codes_of(rounded(x, element), MINIFLOATS[element])[~zero], bits[~zero])


def test_nan_stays_nan():
    for kind in MINIFLOATS.values():
        assert round_to_grid_(torch.tensor([float("nan")]), kind).isnan().all()
