"""The arithmetic of WIRE.md over whole arrays, for exhaustive tests: extremes as metadata, full groups, no bytes."""

import numpy as np
from oracle_floats import EMAX, SMALL_FLOATS, small_values


def nearest_small(x: np.ndarray, element: str) -> np.ndarray:
    """fp32 values of the type nearest to `x`, ties to the even code, saturated, zeros +0."""
    values = np.array(small_values(element))
    middles = (values[1:] + values[:-1]) / 2
    # A tie between codes c and c + 1 goes up when c is odd: then the middle itself already counts as above.
    middles[1::2] = np.nextafter(middles[1::2], 0)
    code = np.searchsorted(middles, np.abs(x.astype(np.float64)), side="left")
    return np.where(code > 0, np.copysign(values[code], x), 0.0).astype(np.float32)


def round_trip(x: np.ndarray, fmt) -> np.ndarray:
    """fp32 values that groups [n, g] of fp32 come back as."""
    with np.errstate(all="ignore"):
        return _round_trip(x, fmt)


def _round_trip(x: np.ndarray, fmt) -> np.ndarray:
    if fmt.kind == "mx":
        return _mx(x, fmt)
    one, zero, b = np.float32(1), np.float32(0), fmt.bits
    low = zero
    if fmt.scheme == "asym":
        low, high = x.min(1, keepdims=True) + zero, x.max(1, keepdims=True) + zero
        extent, factor = high - low, one / np.float32(2**b - 1)
    elif fmt.scheme == "se":
        first = np.argmax(np.abs(x), axis=1)
        extent, factor = x[np.arange(len(x)), first][:, None] + zero, np.float32(-(2.0 ** (1 - b)))
    else:
        largest = SMALL_FLOATS[fmt.element][3] if fmt.element else 2 ** (b - 1) - 1
        extent, factor = np.abs(x).max(1, keepdims=True), one / np.float32(largest)
    step = extent * factor
    inverse = one / step
    inverse[~np.isfinite(inverse)] = 0
    ratio = (x - low) * inverse if fmt.scheme == "asym" else x * inverse
    if fmt.element:
        values = nearest_small(ratio, fmt.element) * step
    elif fmt.scheme == "asym":
        values = np.clip(np.rint(ratio), 0, 2**b - 1) * step + low
    else:
        bottom = -(2 ** (b - 1)) if fmt.scheme == "se" else 1 - 2 ** (b - 1)
        values = np.clip(np.rint(ratio), bottom, 2 ** (b - 1) - 1) * step + zero
    values[~np.isfinite(extent[:, 0])] = np.nan
    return values


def _mx(x: np.ndarray, fmt) -> np.ndarray:
    """In doubles, which hold every quotient and product by a power of two exactly."""
    amax = np.abs(x.astype(np.float64)).max(1, keepdims=True)
    top = 2 ** (fmt.scale_bits - 1) - 1
    exponent = np.clip(np.frexp(amax)[1] - 1 - EMAX[fmt.element], -top, top)
    values = nearest_small(np.ldexp(x.astype(np.float64), -exponent), fmt.element)
    values = np.ldexp(values.astype(np.float64), exponent).astype(np.float32)
    values[~np.isfinite(amax[:, 0])] = np.nan
    return values
