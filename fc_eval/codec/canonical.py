"""One bit pattern for NaN. A cast may give any: on the CPU torch makes 0xFFFF of an fp32 NaN in bf16."""

import torch

# WIRE.md, "Encode one group", rule 2: the integer dtype of the same width, and the pattern.
_PATTERNS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float32: (torch.int32, 0x7FC00000),
}


def fill_nan_(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Writes the canonical NaN where the mask (broadcastable) is true, in place; bf16, fp16 or fp32."""
    integer, pattern = _PATTERNS[values.dtype]
    values.view(integer).masked_fill_(where, pattern)
    return values


def round_to_dtype(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 `sums` rounded once (to nearest even) to `dtype`, every NaN canonical; `sums` itself where it is fp32."""
    rounded = sums.to(dtype)
    return rounded if _has_surely_no_nan(sums) else fill_nan_(rounded, rounded.isnan())


def canonical_nan_(values: torch.Tensor) -> torch.Tensor:
    """Makes every NaN of bf16, fp16 or fp32 `values` canonical, in place."""
    return values if _has_surely_no_nan(values) else fill_nan_(values, values.isnan())


def _has_surely_no_nan(values: torch.Tensor) -> bool:
    # A NaN anywhere makes the sum NaN, and a sum is many times cheaper than a look at every value. On other devices
    # the answer would be a synchronization with the host, so there every NaN is rewritten unasked.
    return values.device.type == "cpu" and not values.sum().isnan()
