"""What every codec can do: values to wire bytes and back. A codec knows formats, not ranks and not layers."""

from typing import NamedTuple, Protocol

import torch

from fc_eval.wire.format import WireFormat

# The names that `wire.layout` and the records use for the dtypes that may be communicated.
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class RoundTrip(NamedTuple):
    """What a message gives back: `values` [T, H] fp32, and how many groups were non-finite (int64 [], same device)."""

    values: torch.Tensor
    nonfinite_groups: torch.Tensor


class Codec(Protocol):
    """One implementation of WIRE.md. All give the same bytes; they differ in speed and in what they cover."""

    name: str

    def why_not(self, fmt: WireFormat, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when this codec covers the format there, otherwise the reason in a few words."""
        ...

    def encode(self, x_TH: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
        """Wire bytes [nbytes] uint8 of values [T, H] in bf16, fp16 or fp32, on the same device.

        Raises:
            FcEvalError: another dtype, number of dimensions or an uncovered format.
        """
        ...

    def decode(self, wire: torch.Tensor, fmt: WireFormat, shape: tuple[int, int], dtype: torch.dtype) -> RoundTrip:
        """Values [T, H] fp32 of wire bytes that were encoded from `dtype`.

        Raises:
            FcEvalError: `wire` is not uint8 or has not exactly the layout's number of bytes.
        """
        ...

    def round_trip(self, x_TH: torch.Tensor, fmt: WireFormat) -> RoundTrip:
        """`decode(encode(x))`, bit for bit, without necessarily making the bytes."""
        ...


class StageFormats(Protocol):
    """What an all-reduce is asked to do: the part of a `collective.comm.Comm` that a codec may know."""

    @property
    def algorithm(self) -> str:
        """A key of `collective.comm.ALGORITHMS`."""
        ...

    @property
    def reduce(self) -> WireFormat | None:
        """Format of the reduce stage, None where nothing is quantized."""
        ...

    @property
    def gather(self) -> WireFormat | None:
        """Format of the gather stage, None where there is none."""
        ...


class FusedCodec(Codec, Protocol):
    """A codec that also does the whole emulated all-reduce in one pass; the same bits, only faster."""

    def why_not_fused(self, comm: StageFormats, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when `fused_all_reduce` covers this, otherwise the reason in a few words."""
        ...

    def fused_all_reduce(self, partials_WTH: torch.Tensor, comm: StageFormats) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [T, H] in the dtype of the partial sums (W >= 2), and the non-finite groups int64 [stages]."""
        ...
