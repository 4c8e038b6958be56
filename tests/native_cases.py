"""What the tests of the native codecs share: formats beyond the reference's, values that can fail, exact comparison."""

import itertools

import pytest
import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.native_extension import native_status
from fc_eval.wire.layout import Layout

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Hidden sizes of real models; 576, 896, 960 and 2880 end in a short group of 128.
HIDDEN_SIZES = (576, 896, 960, 2880, 4096, 7168)


def require(part: str) -> None:
    """Skips the test where the extension 'cpu' or 'cuda' is not there, with the reason."""
    reason = native_status()[part]
    if reason is not None:
        pytest.skip(f"the native {part} codec is not there: {reason}")


def same_bits(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal shape, dtype and bits; the message names the first difference."""
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    integers = INTEGERS[found.element_size()]
    differs = found.contiguous().view(integers) != expected.to(found.device).contiguous().view(integers)
    if differs.any():
        at = differs.nonzero()[0].tolist()
        values = f"{found[tuple(at)].item()!r}, expected {expected[tuple(at)].item()!r}"
        pytest.fail(f"{what}: {int(differs.sum())} of {differs.numel()} differ, the first at {at}: {values}")


def same_round_trip(found: RoundTrip, expected: RoundTrip, what: str) -> None:
    same_bits(found.values, expected.values, what)
    assert int(found.nonfinite_groups) == int(expected.nonfinite_groups), what


def beside_extremes(dtype: torch.dtype) -> torch.Tensor:
    """[N, 8]: every 16-bit value of the dtype, beside extremes from subnormal to the top of the range."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    extremes = [tiny / 4, tiny * 3, 0.011, 1.0, 3.0, 448.0, top / 2, top]
    rows = []
    for large, small in itertools.product(extremes, (0.0, -0.5)):
        six = every[torch.argsort(every.float(), stable=True)][: 65536 // 6 * 6].view(-1, 6)
        ends = torch.tensor([large, small * large]).to(dtype).expand(len(six), 2)
        rows.append(torch.cat([six[:, :3], ends, six[:, 3:]], dim=1))
    return torch.cat(rows)


def section(wire: torch.Tensor, shape: Layout, name: str) -> torch.Tensor:
    """[blocks, payload bytes] of one section."""
    found = shape.section(name)
    assert found is not None
    return wire.view(shape.blocks, shape.block_bytes)[:, found.offset : found.offset + found.payload_bytes]
