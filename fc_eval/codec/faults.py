"""Where a format is at its limits: codes that clamping decided, and groups without any range."""

import torch

from fc_eval.codec.base import DTYPE_NAMES
from fc_eval.codec.eager import eager
from fc_eval.codec.groups import row_parts
from fc_eval.codec.hadamard import in_rotated_space, rotated
from fc_eval.codec.minifloat import magnitudes
from fc_eval.codec.quantize import Scale, extremes_of, level_range, metadata_of, scale_of
from fc_eval.codec.spikes import take_out_
from fc_eval.wire.format import WireFormat
from fc_eval.wire.layout import layout


@eager
def faults_of(x_TH: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
    """Counts what goes wrong when values [T, H] in bf16, fp16 or fp32 are encoded; the device is not waited for.

    Returns:
        int64 [4]: saturated codes (clamping, not rounding, decides them), groups with at least one, groups of zero
        range (all elements equal in the asymmetric scheme, all zero in the others), and all groups. Reserved spikes
        are left out; a non-finite group counts in the last number alone.
    """
    if fmt.hadamard:
        return faults_of(rotated(x_TH), in_rotated_space(fmt))
    values = x_TH.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    counts = torch.zeros(4, dtype=torch.int64, device=values.device)
    for _, part in row_parts(values, layout(fmt, *values.shape, DTYPE_NAMES[x_TH.dtype]).group):
        if fmt.spikes:
            take_out_(part)
        low, high = extremes_of(part, fmt)
        empty = low == 0 if high is None else low == high
        beyond = _saturated(part, scale_of(metadata_of(low, high, fmt), fmt), fmt)
        found = torch.stack([beyond.sum(), beyond.any(-1).sum(), empty.sum()])
        counts += torch.cat([found, found.new_tensor([empty.numel()])])
    return counts


def _saturated(x: torch.Tensor, scale: Scale, fmt: WireFormat) -> torch.Tensor:
    """Which elements of groups [T, G, m] lie so far outside of the levels that rounding would not bring them back."""
    if scale.low is not None:
        x = x - scale.low
    levels = x * scale.inverse
    low, high = level_range(fmt)
    reach = 0.0
    if fmt.minifloat is not None:
        below, largest = magnitudes(fmt.minifloat)[-2:]
        reach = (largest - below) / 2
    else:
        levels = levels.round() if scale.zero is None else levels.round() + scale.zero
    return (levels < low - reach) | (levels > high + reach)
