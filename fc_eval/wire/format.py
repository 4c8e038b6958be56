"""What travels: a `WireFormat` is one row of a table, and its name on the command line says all of it.

A name is a base (`int4`, `fp8_e4m3`, `mxfp4`, ...) followed by suffixes in any order:

    -g32, -gtoken     group size in elements, or one group per token (row)          default -g128, mx -g32
    -asym -sym -se    integer scheme: asymmetric, symmetric, signed extreme         default -asym
    -sbf16 -sfp16 -sfp32   a rounded scale travels instead of the group's extremes  default: extremes
    -slog8            a scale of one byte on a logarithmic grid, in -asym with a zero point of one byte
    -e4m0 ... -e8m0   width of the power-of-two scale of an mx format               default -e8m0
    -zint16           with a scale kind and -asym: an int16 zero point instead of the rounded minimum
    -sr               spike reserving: both extremes of a group travel unquantized (arXiv 2508.03760)
    -had              block-diagonal Hadamard rotation before encoding

`WIRE.md` beside this file is the contract for the arithmetic and the bytes; this file only names things.
"""

import re
from dataclasses import dataclass, fields, replace
from typing import Literal

from fc_eval.errors import FcEvalError, unknown

WIRE_VERSION = 1

Kind = Literal["int", "float", "mx"]
Scheme = Literal["asym", "sym", "se"]
Metadata = Literal["extremes", "bf16", "fp16", "fp32", "log8"]
ZeroPoint = Literal["min", "int16"]
GroupSize = int | Literal["token"]

MIN_GROUP, MAX_GROUP = 8, 4096
# OCP Microscaling: blocks of 32 with an E8M0 scale. Narrower scales: arXiv 2411.09510.
MX_GROUP, MIN_SCALE_BITS, MAX_SCALE_BITS = 32, 4, 8


@dataclass(frozen=True)
class Minifloat:
    """A small float without infinities: `exponent` and `mantissa` bits; `largest` is its largest finite value."""

    exponent: int
    mantissa: int
    bias: int
    emax: int
    largest: float

    @property
    def bits(self) -> int:
        """Width of one code in bits, the sign included."""
        return 1 + self.exponent + self.mantissa


# The table of WIRE.md. E4M3 and E5M2 are the OCP 8-bit types (largest finite 448 and 57344), the 6- and
# 4-bit ones the OCP microscaling types; 5- and 3-bit ones follow the same rule without Inf and NaN.
MINIFLOATS: dict[str, Minifloat] = {
    "e5m2": Minifloat(5, 2, 15, 15, 57344.0),
    "e4m3": Minifloat(4, 3, 7, 8, 448.0),
    "e3m2": Minifloat(3, 2, 3, 4, 28.0),
    "e2m3": Minifloat(2, 3, 1, 2, 7.5),
    "e3m1": Minifloat(3, 1, 3, 4, 24.0),
    "e2m2": Minifloat(2, 2, 1, 2, 7.0),
    "e3m0": Minifloat(3, 0, 3, 4, 16.0),
    "e2m1": Minifloat(2, 1, 1, 2, 6.0),
    "e1m2": Minifloat(1, 2, 0, 1, 3.5),
    "e2m0": Minifloat(2, 0, 1, 2, 4.0),
    "e1m1": Minifloat(1, 1, 0, 1, 3.0),
}
# The integers of mx formats, sign and magnitude in steps of 2^(2 - b): a float with one exponent bit has an even grid.
MINIFLOATS |= {f"int{b}": Minifloat(1, b - 2, 1, 0, (2 ** (b - 1) - 1) / 2 ** (b - 2)) for b in (8, 5, 4, 3)}


@dataclass(frozen=True)
class WireFormat:
    """One way to put a group of values into bits (WIRE.md, "Encode one group").

    Attributes:
        base: name without suffixes, as on the command line.
        kind: integer codes, minifloat codes with a float scale, or `mx` (power-of-two scale).
        bits: bits per code, 2 to 8.
        group_size: elements per group along one row, or "token" for one group per row.
        scheme: how integer codes map to values; None for minifloats and mx.
        element: minifloat name (a key of `MINIFLOATS`); None for integers with an integer scheme.
        metadata: "extremes" (the group's own extremes in the input dtype), the dtype of a rounded scale, or "log8" for
            one of 8 bits on a logarithmic grid.
        zero_point: what travels beside a scale of bf16, fp16 or fp32 in the asymmetric scheme.
        scale_bits: width of an `mx` scale in bits, 0 otherwise.
        spikes: the group's smallest and largest element travel unquantized.
        hadamard: rows are rotated before encoding.
    """

    base: str
    kind: Kind
    bits: int
    group_size: GroupSize = 128
    scheme: Scheme | None = None
    element: str | None = None
    metadata: Metadata = "extremes"
    zero_point: ZeroPoint = "min"
    scale_bits: int = 0
    spikes: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        g = self.group_size
        if g != "token" and not (isinstance(g, int) and not isinstance(g, bool) and MIN_GROUP <= g <= MAX_GROUP):
            raise FcEvalError(
                f"group size {g!r} of format {self.base!r} is not possible: "
                f"expected {MIN_GROUP} to {MAX_GROUP} elements, or 'token' for one group per token"
            )
        if self.scheme is not None and self.kind != "int":
            raise FcEvalError(f"format {self.base!r} has no integer scheme: leave out '-{self.scheme}'")
        if self.metadata != "extremes" and self.kind == "mx":
            raise FcEvalError(f"format {self.base!r} has a power-of-two scale: leave out '-s{self.metadata}'")
        if self.scale_bits and self.kind != "mx":
            raise FcEvalError(f"format {self.base!r} has no power-of-two scale: leave out '-e{self.scale_bits}m0'")
        if self.kind == "mx" and not MIN_SCALE_BITS <= self.scale_bits <= MAX_SCALE_BITS:
            raise FcEvalError(
                f"a scale of {self.scale_bits} bits in format {self.base!r} is not possible: "
                f"expected {MIN_SCALE_BITS} to {MAX_SCALE_BITS}"
            )
        if self.zero_point == "int16" and (self.scheme != "asym" or self.metadata == "extremes"):
            raise FcEvalError("'-zint16' needs the asymmetric scheme and a rounded scale, as in 'int4-sfp16-zint16'")
        if self.zero_point == "int16" and self.metadata == "log8":
            raise FcEvalError(f"'-slog8' has a zero point of 8 bits: leave out '-zint16' of format {self.base!r}")
        if self.scheme == "se" and self.metadata == "log8":
            raise FcEvalError(f"'-slog8' has no place for a sign: use asym or sym with format {self.base!r}")

    @property
    def name(self) -> str:
        """Full name: the group size and the scheme are always spelled out, other suffixes only where they differ."""
        parts = [self.base, f"g{self.group_size}"]
        if self.scheme is not None:
            parts.append(self.scheme)
        if self.metadata != "extremes":
            parts.append(f"s{self.metadata}")
        if self.zero_point != "min":
            parts.append(f"z{self.zero_point}")
        if self.scale_bits not in (0, MAX_SCALE_BITS):
            parts.append(f"e{self.scale_bits}m0")
        parts += [tag for tag, on in (("sr", self.spikes), ("had", self.hadamard)) if on]
        return "-".join(parts)

    @property
    def minifloat(self) -> Minifloat | None:
        """The element type of a minifloat or mx format, None for integers."""
        return MINIFLOATS[self.element] if self.element is not None else None

    @property
    def zero_bits(self) -> int:
        """Bits of the integer zero point that travels beside the scale, 0 where there is none."""
        if self.scheme != "asym" or self.metadata == "extremes":
            return 0
        return 8 if self.metadata == "log8" else 16 * (self.zero_point == "int16")

    def with_group(self, group_size: GroupSize) -> "WireFormat":
        """The same format with another group size."""
        return replace(self, group_size=group_size)

    def __str__(self) -> str:
        return self.name


def _mx_elements() -> dict[str, str]:
    """{base: element} of the OCP microscaling formats, then of the other ones that arXiv 2411.09510 tries."""
    ocp = {"mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp6_e3m2": "e3m2", "mxfp6_e2m3": "e2m3", "mxfp4": "e2m1"}
    ocp |= {"mxint8": "int8"}
    floats = {f"mxfp{MINIFLOATS[e].bits}_{e}": e for e in ("e3m1", "e2m2", "e3m0", "e1m2", "e2m0", "e1m1")}
    return ocp | floats | {f"mxint{bits}": f"int{bits}" for bits in (5, 4, 3)}


def _base_formats() -> dict[str, WireFormat]:
    rows = [WireFormat(f"int{bits}", "int", bits, scheme="asym") for bits in range(8, 1, -1)]
    rows += [
        WireFormat(f"fp{MINIFLOATS[element].bits}_{element}", "float", MINIFLOATS[element].bits, element=element)
        for element in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "e3m1", "e2m2", "e3m0", "e1m2", "e2m0", "e1m1")
    ]
    rows += [
        WireFormat(base, "mx", MINIFLOATS[element].bits, MX_GROUP, element=element, scale_bits=MAX_SCALE_BITS)
        for base, element in _mx_elements().items()
    ]
    return {row.base: row for row in rows}


FORMATS: dict[str, WireFormat] = _base_formats()

# Suffixes with a fixed spelling and the field they set; -g is parsed apart because its value is free.
_SUFFIXES: dict[str, tuple[str, object]] = {
    "asym": ("scheme", "asym"),
    "sym": ("scheme", "sym"),
    "se": ("scheme", "se"),
    "sbf16": ("metadata", "bf16"),
    "sfp16": ("metadata", "fp16"),
    "sfp32": ("metadata", "fp32"),
    "slog8": ("metadata", "log8"),
    "zint16": ("zero_point", "int16"),
    **{f"e{bits}m0": ("scale_bits", bits) for bits in range(MIN_SCALE_BITS, MAX_SCALE_BITS + 1)},
    "sr": ("spikes", True),
    "had": ("hadamard", True),
}
assert {field for field, _ in _SUFFIXES.values()} <= {field.name for field in fields(WireFormat)}


def parse_group_size(text: str | int) -> GroupSize:
    """Reads a group size: a whole number of elements, or 'token'.

    Raises:
        FcEvalError: neither of the two.
    """
    if text == "token":
        return "token"
    try:
        return int(text)
    except ValueError:
        raise FcEvalError(
            f"group size {text!r} is not possible: expected {MIN_GROUP} to {MAX_GROUP} elements, or 'token'"
        ) from None


def parse_format(text: "str | WireFormat") -> WireFormat:
    """Reads a format name such as `int4-g32-sym`; a `WireFormat` passes through.

    Raises:
        FcEvalError: unknown base or suffix (with the nearest names), a field set twice, an impossible group size.
    """
    if isinstance(text, WireFormat):
        return text
    base, *suffixes = str(text).strip().split("-")
    if base not in FORMATS:
        raise unknown("format", base, FORMATS, hint="`fc-eval formats` lists them")
    changes: dict[str, object] = {}
    for suffix in suffixes:
        group = re.fullmatch(r"g(\w+)", suffix)
        if group is not None:
            field, value = "group_size", parse_group_size(group.group(1))
        elif suffix in _SUFFIXES:
            field, value = _SUFFIXES[suffix]  # type: ignore[assignment]
        else:
            raise unknown(f"suffix in format {text!r}:", f"-{suffix}", [f"-{s}" for s in ("g32", *_SUFFIXES)])
        if field in changes:
            raise FcEvalError(f"format {text!r} sets {field} twice: keep one of the two suffixes")
        changes[field] = value
    return replace(FORMATS[base], **changes)  # type: ignore[arg-type]
