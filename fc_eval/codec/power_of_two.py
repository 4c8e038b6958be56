"""Power-of-two scales (WIRE.md, "mx"; OCP Microscaling Formats v1.0), from the bits alone and never by logarithm.

Scales are fp32 of any shape, exact; NaN marks a non-finite group. A scale code is the exponent plus a bias.
"""

import torch

from fc_eval.codec.canonical import fill_nan_
from fc_eval.wire.format import WireFormat


def largest_exponent(fmt: WireFormat) -> int:
    """Exponents go from minus this to this; it is also the bias of the scale codes (127 for E8M0)."""
    return (1 << (fmt.scale_bits - 1)) - 1


def shared_scale(amax: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
    """2^E of groups with the largest magnitude `amax`: E = floor(log2 amax) - emax, clamped; the smallest for 0."""
    assert fmt.minifloat is not None
    limit = largest_exponent(fmt)
    exponent = (torch.frexp(amax).exponent - 1 - fmt.minifloat.emax).clamp_(-limit, limit)
    scale = _power_of_two(exponent.masked_fill_(amax == 0, -limit))
    return fill_nan_(scale, (amax < torch.inf).logical_not_())


def scale_codes(scale: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
    """Codes uint8 of scales; all ones for NaN."""
    limit = largest_exponent(fmt)
    codes = torch.frexp(scale).exponent - 1 + limit
    return codes.masked_fill_(scale.isnan(), 2 * limit + 1).to(torch.uint8)


def scales_of(codes: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
    """The scales of uint8 codes."""
    limit = largest_exponent(fmt)
    return fill_nan_(_power_of_two(codes.int() - limit), codes == 2 * limit + 1)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32 for int32 exponents -127 to 127, any value for others; 2^-127 is subnormal."""
    return torch.where(exponent > -127, (exponent + 127) << 23, 0x00400000).view(torch.float32)
