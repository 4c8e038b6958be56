"""A format as the integers that cross the boundary to the native code. Pure integers, no tensors."""

import math
from types import ModuleType

from fc_eval.wire.format import MINIFLOATS, Minifloat, WireFormat

FormatInts = tuple[int, ...]


def format_ints(fmt: WireFormat, module: ModuleType) -> FormatInts:
    """A format as the integers of `FORMAT_FIELDS`, whose meaning the extension itself declares."""
    small = fmt.minifloat
    fields = {
        "kind": module.KINDS[fmt.kind],
        "bits": fmt.bits,
        "group": 0 if fmt.group_size == "token" else fmt.group_size,
        "scheme": module.NO_SCHEME if fmt.scheme is None else module.SCHEMES[fmt.scheme],
        "exponent": small.exponent if small else 0,
        "mantissa": small.mantissa if small else 0,
        "bias": small.bias if small else 0,
        "max_code": _LARGEST_CODES[fmt.element] if fmt.element else 0,
        "emax": small.emax if small and fmt.kind == "mx" else 0,
        "scale_bits": fmt.scale_bits,
        "spikes": int(fmt.spikes),
    }
    return tuple(fields[name] for name in module.FORMAT_FIELDS)


def _largest_code(small: Minifloat) -> int:
    """Code of the largest finite value: 2^e (1 + m / 2^M) has exponent field e + bias and mantissa m."""
    half, exponent = math.frexp(small.largest)  # largest = half * 2^exponent, half in [1/2, 1)
    return ((exponent - 1 + small.bias) << small.mantissa) + int((2 * half - 1) * (1 << small.mantissa))


_LARGEST_CODES = {name: _largest_code(small) for name, small in MINIFLOATS.items()}
