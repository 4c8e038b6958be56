"""What the tests of the native codecs share: formats beyond the reference's, values that can fail, exact comparison."""

import itertools
from collections.abc import Callable

import numpy as np
import oracle_floats as floats
import pytest
import torch

from fc_eval.codec.base import DTYPE_NAMES, RoundTrip
from fc_eval.codec.native_extension import native_status
from fc_eval.wire import MINIFLOATS, WireFormat, parse_format
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


def mx_format(element: str | None, bits: int, group: int = 32, scale_bits: int = 8) -> WireFormat:
    """A power-of-two scale; `element` is a minifloat, or None for sign-magnitude integers."""
    return WireFormat(f"mx_{element or f'int{bits}'}", "mx", bits, group, element=element, scale_bits=scale_bits)


MX_FORMATS = [mx_format(name, kind.bits) for name, kind in MINIFLOATS.items()]
MX_FORMATS += [mx_format(None, 8), mx_format(None, 4, scale_bits=5), mx_format(None, 3, 16, scale_bits=7)]
SPIKE_FORMATS = [
    parse_format(name)
    for name in ("int2-g32-sr", "int3-g64-sr", "int4-g128-sym-sr", "int5-g9-se-sr", "fp4_e2m1-g32-sr", "int2-gtoken-sr")
]
SPIKE_FORMATS += [parse_format("int3-g1024-sr"), parse_format("int4-g4096-sr")]


# A second opinion on mx and spikes, scalar, from WIRE.md alone --------------------------------------------------------

Group = list[np.float32]


def _mx_group(x: Group, fmt: WireFormat) -> tuple[int, list[int], Group]:
    """Scale code, codes and decoded values of a finite group."""
    top = 2 ** (fmt.scale_bits - 1) - 1
    amax = max(abs(float(v)) for v in x)
    if amax == 0:
        return 0, [0] * len(x), [floats.ZERO] * len(x)
    emax = MINIFLOATS[fmt.element].emax if fmt.element else 0
    exponent = min(max(int(np.floor(np.log2(np.float64(amax)))) - emax, -top), top)
    codes, values = [], []
    for v in x:
        scaled = np.float32(np.float64(v) * 2.0**-exponent)
        if fmt.element:
            code = floats.small_code(scaled, fmt.element)
            level = floats.small_value(code, fmt.element)
        else:
            steps = min(round(abs(float(scaled)) * 2 ** (fmt.bits - 2)), 2 ** (fmt.bits - 1) - 1)
            code = steps + (2 ** (fmt.bits - 1) if v < 0 and steps else 0)
            level = (-1 if v < 0 else 1) * steps / 2 ** (fmt.bits - 2)
        codes.append(code)
        values.append(floats.plus_zero(np.float32(level)) * np.float32(2.0**exponent))
    return exponent + top, codes, values


def mx_round_trip(x: Group, fmt: WireFormat) -> Group:
    if not all(floats.finite(v) for v in x):
        return [floats.NAN] * len(x)
    return _mx_group(x, fmt)[2]


def mx_codes(x: Group, fmt: WireFormat) -> tuple[int, list[int]]:
    if not all(floats.finite(v) for v in x):
        return 2**fmt.scale_bits - 1, [0] * len(x)
    return _mx_group(x, fmt)[:2]


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
