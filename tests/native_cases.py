"""What the tests of the native codecs share: formats beyond the reference's, values that can fail, exact comparison."""

import itertools
from collections.abc import Callable

import numpy as np
import oracle_floats as floats
import pytest
import torch

from fc_eval.codec.base import DTYPE_NAMES, RoundTrip
from fc_eval.codec.native_extension import native_status
from fc_eval.wire import WireFormat, parse_format
from fc_eval.wire.layout import Layout, layout

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


SPIKE_FORMATS = [
    parse_format(name)
    for name in ("int2-g32-sr", "int3-g64-sr", "int4-g128-sym-sr", "int5-g9-se-sr", "fp4_e2m1-g32-sr", "int2-gtoken-sr")
]
SPIKE_FORMATS += [parse_format("int3-g1024-sr"), parse_format("int4-g4096-sr")]


# A second opinion on spikes, scalar, from WIRE.md alone --------------------------------------------------------

Group = list[np.float32]


def spike_positions(x: Group) -> tuple[int, int]:
    low = min(range(len(x)), key=lambda i: (x[i], i))
    others = [i for i in range(len(x)) if i != low] or [low]
    return low, max(others, key=lambda i: (x[i], -i))


def spike_round_trip(x: Group, plain: Callable[[Group], Group]) -> Group:
    """`plain` is the round trip of the same format without spikes, for any number of elements."""
    if not all(floats.finite(v) for v in x):
        return [floats.NAN] * len(x)
    low, high = spike_positions(x)
    kept = [v for i, v in enumerate(x) if i not in (low, high)]
    decoded = iter(plain(kept) if kept else [])
    values = [floats.ZERO if i in (low, high) else next(decoded) for i in range(len(x))]
    if any(np.isnan(v) for v in values):
        return [floats.NAN] * len(x)
    values[low] = floats.plus_zero(x[low])
    values[high] = floats.plus_zero(x[high])
    return values


def groups_of(x_TH: torch.Tensor, fmt: WireFormat) -> list[tuple[int, int, Group]]:
    """(row, first column, values) of every group."""
    size = layout(fmt, *x_TH.shape, DTYPE_NAMES[x_TH.dtype]).group
    rows = x_TH.float().numpy()
    return [(t, c, list(row[c : c + size])) for t, row in enumerate(rows) for c in range(0, len(row), size)]


def section(wire: torch.Tensor, shape: Layout, name: str) -> torch.Tensor:
    """[blocks, payload bytes] of one section."""
    found = shape.section(name)
    assert found is not None
    return wire.view(shape.blocks, shape.block_bytes)[:, found.offset : found.offset + found.payload_bytes]
