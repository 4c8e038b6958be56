"""Floats of the oracle: bits, rounding and minifloats, scalar and from WIRE.md alone."""

import functools
import math
import struct

import numpy as np

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}
NAN_BITS = {"bf16": 0x7FC0, "fp16": 0x7E00, "fp32": 0x7FC00000}
MAX_BITS = {"bf16": 0x7F7F, "fp16": 0x7BFF, "fp32": 0x7F7FFFFF}
# type: (exponent bits, mantissa bits, bias, largest finite value)
SMALL_FLOATS = {
    "e5m2": (5, 2, 15, 57344.0),
    "e4m3": (4, 3, 7, 448.0),
    "e3m2": (3, 2, 3, 28.0),
    "e2m3": (2, 3, 1, 7.5),
    "e3m1": (3, 1, 3, 24.0),
    "e2m2": (2, 2, 1, 7.0),
    "e3m0": (3, 0, 3, 16.0),
    "e2m1": (2, 1, 1, 6.0),
    "e1m2": (1, 2, 0, 3.5),
    "e2m0": (2, 0, 1, 4.0),
    "e1m1": (1, 1, 0, 3.0),
}
INTEGERS = {"int8": 8, "int5": 5, "int4": 4, "int3": 3}  # of mx: sign and magnitude in steps of 2^(2 - bits)
SMALL_FLOATS |= {name: (0, b - 1, 0, (2 ** (b - 1) - 1) / 2 ** (b - 2)) for name, b in INTEGERS.items()}
EMAX = {"e5m2": 15, "e4m3": 8, "e3m2": 4, "e2m3": 2, "e3m1": 4, "e2m2": 2, "e3m0": 4, "e2m1": 2, "e1m2": 1, "e2m0": 2}
EMAX |= {"e1m1": 1, "int8": 0, "int5": 0, "int4": 0, "int3": 0}
ZERO, ONE, NAN = np.float32(0), np.float32(1), np.float32("nan")


def to_bits(x: np.float32, dtype: str) -> int:
    """Bits of `x` rounded to nearest even in `dtype`; NaN is canonical."""
    if math.isnan(x):
        return NAN_BITS[dtype]
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    if dtype == "fp32":
        return bits
    if dtype == "bf16":
        kept, dropped = bits >> 16, bits & 0xFFFF
        return kept + (dropped > 0x8000 or (dropped == 0x8000 and kept & 1))
    try:
        return struct.unpack("<H", struct.pack("<e", float(x)))[0]
    except OverflowError:
        return 0x7C00 | (0x8000 if x < 0 else 0)


def from_bits(bits: int, dtype: str) -> np.float32:
    if dtype == "fp16":
        return np.float32(struct.unpack("<e", struct.pack("<H", bits))[0])
    return np.float32(struct.unpack("<f", struct.pack("<I", bits << 16 if dtype == "bf16" else bits))[0])


def rounded(x: np.float32, dtype: str) -> np.float32:
    return from_bits(to_bits(x, dtype), dtype)


def saturated(x: np.float32, dtype: str) -> np.float32:
    largest = from_bits(MAX_BITS[dtype], dtype)
    return rounded(min(max(x, -largest), largest), dtype)


def plus_zero(x: np.float32) -> np.float32:
    return ZERO if x == 0 else x


def finite(x: np.float32) -> bool:
    return math.isfinite(x)


def small_value(code: int, element: str) -> float:
    """The value by the formula; a decoder reads what lies above the largest finite value as that (`read_code`)."""
    exponent, mantissa, bias, _ = SMALL_FLOATS[element]
    sign = -1.0 if code >> (exponent + mantissa) else 1.0
    if element in INTEGERS:
        return sign * (code & (2**mantissa - 1)) / 2 ** (mantissa - 1)
    field, fraction = (code >> mantissa) & (2**exponent - 1), code & (2**mantissa - 1)
    if field == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / 2**mantissa) * 2.0 ** (field - bias)


def read_code(code: int, element: str) -> float:
    largest = SMALL_FLOATS[element][3]
    return min(max(small_value(code, element), -largest), largest)


def small_code(x: np.float32, element: str) -> int:
    """The code nearest to `x`, ties to the even code, saturated; doubles hold every midpoint exactly."""
    exponent, mantissa, _, largest = SMALL_FLOATS[element]
    magnitude = min(abs(float(x)), largest)
    _, _, code = min((abs(value - magnitude), code & 1, code) for code, value in enumerate(small_values(element)))
    return code + (2 ** (exponent + mantissa) if x < 0 and code else 0)


@functools.cache
def small_values(element: str) -> list[float]:
    """The values of the codes without sign, up to the largest finite one."""
    exponent, mantissa, _, largest = SMALL_FLOATS[element]
    values = [small_value(code, element) for code in range(2 ** (exponent + mantissa))]
    return [value for value in values if value <= largest]
