"""The readable definition of WIRE.md in PyTorch, on any device. Native codecs are measured against it.

T tokens, H hidden, G groups per row, NB blocks, E elements per block.
"""

import torch

from fc_eval.codec.base import DTYPE_NAMES, RoundTrip
from fc_eval.codec.canonical import canonical_nan_, fill_nan_
from fc_eval.codec.eager import eager
from fc_eval.codec.groups import row_parts
from fc_eval.codec.hadamard import in_rotated_space, rotate, rotated
from fc_eval.codec.message import Contents, from_bytes, to_bytes
from fc_eval.codec.minifloat import codes_of, values_of
from fc_eval.codec.quantize import (
    Metadata,
    Scale,
    code_bias,
    dequantize_,
    extremes_of,
    metadata_of,
    quantize_,
    scale_of,
)
from fc_eval.codec.spikes import Spikes, put_back_, take_out_
from fc_eval.errors import FcEvalError
from fc_eval.wire.format import WireFormat
from fc_eval.wire.layout import Layout, layout

Parts = list[tuple[slice, torch.Tensor]]


class ReferenceCodec:
    """WIRE.md for every element type, scheme, scale, metadata kind and group size, and for rotated rows."""

    name = "reference"

    def why_not(self, fmt: WireFormat, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `Codec`; every device is covered."""
        if dtype not in DTYPE_NAMES:
            return f"{dtype} is not bf16, fp16 or fp32"
        return None

    @eager
    def encode(self, x_TH: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
        """See `Codec`."""
        shape = self._layout_of(x_TH, fmt)
        if fmt.hadamard:
            return self.encode(rotated(x_TH), in_rotated_space(fmt))
        parts = list(row_parts(_fp32_copy(x_TH), shape.group))
        spikes = [take_out_(part) for _, part in parts] if fmt.spikes else []
        meta, scale = _analyse(parts, fmt)
        # Missing elements of short groups and all elements of non-finite groups keep or get the raw code 0.
        codes = x_TH.new_zeros((shape.tokens, shape.groups_per_row, shape.group), dtype=torch.uint8)
        bias = code_bias(fmt)
        for columns, part in parts:
            levels = quantize_(part, _columns(scale, columns), fmt)
            levels.masked_fill_(scale.step[:, columns].isnan(), -bias)
            stored = codes_of(levels, fmt.minifloat) if fmt.minifloat else (levels + bias).to(torch.uint8)
            codes[:, columns, : part.shape[-1]] = stored
        if not spikes:
            return to_bytes(Contents(codes, meta, None), shape, x_TH.dtype)
        reserved = Spikes(*(torch.cat(arrays, dim=1) for arrays in zip(*spikes, strict=True)))
        codes.scatter_(-1, reserved.positions, 0)
        return to_bytes(Contents(codes, meta, reserved.without(scale.step.isnan())), shape, x_TH.dtype)

    @eager
    def decode(self, wire: torch.Tensor, fmt: WireFormat, shape: tuple[int, int], dtype: torch.dtype) -> RoundTrip:
        """See `Codec`."""
        message = layout(fmt, *shape, _dtype_name(dtype))
        self._require(fmt, dtype, wire.device)
        if wire.dtype != torch.uint8 or wire.numel() != message.total_bytes:
            raise FcEvalError(
                f"the wire bytes are {wire.numel()} of {wire.dtype}: expected {message.total_bytes} of torch.uint8 "
                f"for {fmt.name} of {shape[0]} x {shape[1]} {_dtype_name(dtype)} values"
            )
        if fmt.hadamard:
            return _turned_back(self.decode(wire, in_rotated_space(fmt), shape, dtype))
        codes, meta, spikes = from_bytes(wire, message, dtype)
        scale = scale_of(meta, fmt)
        levels = values_of(codes, fmt.minifloat) if fmt.minifloat else codes.float() - code_bias(fmt)
        values = levels.new_empty(shape)
        parts = list(row_parts(values, message.group))
        for columns, part in parts:
            part.copy_(dequantize_(levels[:, columns, : part.shape[-1]], _columns(scale, columns), fmt))
            if spikes is not None:
                put_back_(part, Spikes(*(array[:, columns] for array in spikes)))
        count = _mark_broken(parts, scale)
        return RoundTrip(canonical_nan_(values), count)  # foreign bytes: NaN spikes, infinite steps

    @eager
    def round_trip(self, x_TH: torch.Tensor, fmt: WireFormat) -> RoundTrip:
        """See `Codec`; makes no codes and no bytes, and works in place on one fp32 copy of `x_TH`."""
        shape = self._layout_of(x_TH, fmt)
        if fmt.hadamard:
            return _turned_back(self.round_trip(rotated(x_TH), in_rotated_space(fmt)))
        values = _fp32_copy(x_TH)
        parts = list(row_parts(values, shape.group))
        spikes = [take_out_(part) for _, part in parts] if fmt.spikes else []
        _, scale = _analyse(parts, fmt)
        for columns, part in parts:
            own = _columns(scale, columns)
            dequantize_(quantize_(part, own, fmt), own, fmt)
        for (_, part), reserved in zip(parts, spikes, strict=bool(spikes)):
            put_back_(part, reserved)
        return RoundTrip(values, _mark_broken(parts, scale))

    def _layout_of(self, x_TH: torch.Tensor, fmt: WireFormat) -> Layout:
        if x_TH.dim() != 2:
            raise FcEvalError(f"values of shape {list(x_TH.shape)} cannot be encoded: expected [tokens, hidden]")
        self._require(fmt, x_TH.dtype, x_TH.device)
        return layout(fmt, x_TH.shape[0], x_TH.shape[1], DTYPE_NAMES[x_TH.dtype])

    def _require(self, fmt: WireFormat, dtype: torch.dtype, device: torch.device) -> None:
        reason = self.why_not(fmt, dtype, device)
        if reason is not None:
            raise FcEvalError(f"the codec 'reference' cannot be used: {reason}")


def _turned_back(found: RoundTrip) -> RoundTrip:
    return RoundTrip(canonical_nan_(rotate(found.values)), found.nonfinite_groups)


def _dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))


def _fp32_copy(x_TH: torch.Tensor) -> torch.Tensor:
    return x_TH.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _analyse(parts: Parts, fmt: WireFormat) -> tuple[Metadata, Scale]:
    """Metadata and scale of every group of fp32 rows."""
    found = [extremes_of(part, fmt) for _, part in parts]
    low = torch.cat([low for low, _ in found], dim=1)
    highs = [high for _, high in found if high is not None]
    meta = metadata_of(low, torch.cat(highs, dim=1) if highs else None, fmt)
    return meta, scale_of(meta, fmt)


def _columns(scale: Scale, columns: slice) -> Scale:
    """The scale of some of the groups of every row."""
    if scale.step.shape[1] == columns.stop - columns.start:
        return scale
    return Scale(*(None if array is None else array[:, columns] for array in scale))  # type: ignore[arg-type]


def _mark_broken(parts: Parts, scale: Scale) -> torch.Tensor:
    """Makes the NaN of non-finite groups canonical; how many groups there are."""
    broken = scale.step.isnan()
    count = broken.sum()
    # Only on the CPU does looking at the count cost nothing; elsewhere the host would wait for the device.
    if count.device.type != "cpu" or count:
        for columns, part in parts:
            fill_nan_(part, broken[:, columns])
    return count
