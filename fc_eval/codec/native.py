"""The native codecs: WIRE.md in C++ on the CPU and in CUDA, one arithmetic compiled twice (`cuda_ext/include/fc`).

They give the reference's bytes and values, bit for bit, for the formats that they cover, and the whole emulated
all-reduce in one pass. `native_status` says why one is missing. T tokens, H hidden, W ranks.
"""

import torch

from fc_eval.codec import native_ops
from fc_eval.codec.base import DTYPE_NAMES, RoundTrip, StageFormats
from fc_eval.codec.native_extension import extension, format_ints, native_status, row_contiguous
from fc_eval.errors import FcEvalError
from fc_eval.wire.format import WireFormat
from fc_eval.wire.layout import layout

__all__ = ["FUSED_ALGORITHMS", "CpuCodec", "CudaCodec", "NativeCodec", "cpu_codec", "cuda_codec", "native_status"]

# Stages of the algorithms that run in one pass over the partial sums; each stage counts its non-finite groups.
FUSED_ALGORITHMS: dict[str, int] = {"two_step": 2, "one_step": 1, "fp32_ordered": 0}


class NativeCodec:
    """A `Codec` over one extension module.

    Args:
        isa: instruction set of the CPU codec, '' for the best of this machine; results do not depend on it.

    Raises:
        CodecUnavailable: the extension was not built, or there is no device for it.
    """

    name: str
    device_type: str

    def __init__(self, isa: str = "") -> None:
        self.isa = isa
        self._module = extension(self.name)

    def _why_not_in_one_pass(self, fmt: WireFormat) -> str | None:
        """Why the fused all-reduce does not cover a format that the codec covers."""
        return None

    def why_not(self, fmt: WireFormat, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `Codec`."""
        if dtype not in DTYPE_NAMES:
            return f"{dtype} is not bf16, fp16 or fp32"
        if torch.device(device).type != self.device_type:
            return f"it works on {self.device_type} tensors, not on {torch.device(device).type}"
        if fmt.metadata != "extremes":
            return f"{fmt.name} sends a rounded scale, which it does not cover"
        if fmt.hadamard:
            return f"{fmt.name} rotates its rows, which it does not cover"
        return None

    def encode(self, x_TH: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
        """See `Codec`."""
        x_TH = self._checked(x_TH, fmt)
        nbytes = layout(fmt, x_TH.shape[0], x_TH.shape[1], DTYPE_NAMES[x_TH.dtype]).total_bytes
        wire: torch.Tensor = native_ops.encode(x_TH, self._ints(fmt), nbytes, self.isa)
        return wire

    def decode(self, wire: torch.Tensor, fmt: WireFormat, shape: tuple[int, int], dtype: torch.dtype) -> RoundTrip:
        """See `Codec`."""
        self._require(fmt, dtype, wire.device)
        tokens, hidden = shape
        expected = layout(fmt, tokens, hidden, DTYPE_NAMES[dtype]).total_bytes
        if wire.dtype != torch.uint8 or wire.numel() != expected:
            raise FcEvalError(
                f"the wire bytes are {wire.numel()} of {wire.dtype}: expected {expected} of torch.uint8 "
                f"for {fmt.name} of {tokens} x {hidden} {DTYPE_NAMES[dtype]} values"
            )
        flat = wire.detach().reshape(-1).contiguous()
        return RoundTrip(*native_ops.decode(flat, self._ints(fmt), DTYPE_NAMES[dtype], tokens, hidden, self.isa))

    def round_trip(self, x_TH: torch.Tensor, fmt: WireFormat) -> RoundTrip:
        """See `Codec`."""
        x_TH = self._checked(x_TH, fmt)
        return RoundTrip(*native_ops.round_trip(x_TH, self._ints(fmt), self.isa))

    def why_not_fused(self, comm: StageFormats, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when `fused_all_reduce` covers this, otherwise the reason in a few words."""
        if comm.algorithm not in FUSED_ALGORITHMS:
            return f"{comm.algorithm} is not one of {', '.join(FUSED_ALGORITHMS)}"
        if dtype not in DTYPE_NAMES:
            return f"{dtype} is not bf16, fp16 or fp32"
        if torch.device(device).type != self.device_type:
            return f"it works on {self.device_type} tensors, not on {torch.device(device).type}"
        formats = [fmt for fmt in (comm.reduce, comm.gather) if fmt is not None]
        reasons = [self.why_not(fmt, dtype, device) or self._why_not_in_one_pass(fmt) for fmt in formats]
        return next((reason for reason in reasons if reason is not None), None)

    def fused_all_reduce(self, partials_WTH: torch.Tensor, comm: StageFormats) -> tuple[torch.Tensor, torch.Tensor]:
        """The emulated all-reduce in one pass: each partial sum is read once, the result written once.

        Args:
            partials_WTH: one partial sum per rank, W >= 2, in bf16, fp16 or fp32.
            comm: 'two_step', 'one_step' or 'fp32_ordered' with the formats of its stages.

        Returns:
            (values [T, H] in the dtype of the partials, non-finite groups int64 [stages] over all ranks).

        Raises:
            FcEvalError: another shape, or something that `why_not_fused` names.
        """
        if partials_WTH.dim() != 3 or partials_WTH.shape[0] < 2 or partials_WTH.shape[2] < 1:
            raise FcEvalError(
                f"partial sums of shape {list(partials_WTH.shape)} cannot be reduced: expected [ranks, tokens, hidden] "
                "with 2 ranks or more"
            )
        reason = self.why_not_fused(comm, partials_WTH.dtype, partials_WTH.device)
        if reason is not None:
            raise FcEvalError(f"the codec {self.name!r} cannot do this all-reduce: {reason}")
        values, nonfinite = native_ops.all_reduce(
            row_contiguous(partials_WTH),
            comm.algorithm,
            self._ints(comm.reduce) if comm.reduce is not None else (),
            self._ints(comm.gather) if comm.gather is not None else (),
            self.isa,
        )
        return values, nonfinite[: FUSED_ALGORITHMS[comm.algorithm]]

    def _ints(self, fmt: WireFormat) -> tuple[int, ...]:
        return format_ints(fmt, self._module)

    def _checked(self, x_TH: torch.Tensor, fmt: WireFormat) -> torch.Tensor:
        if x_TH.dim() != 2 or x_TH.shape[1] < 1:
            raise FcEvalError(f"values of shape {list(x_TH.shape)} cannot be encoded: expected [tokens, hidden]")
        self._require(fmt, x_TH.dtype, x_TH.device)
        if fmt.spikes:  # positions have 16 bits: the layout refuses longer groups
            layout(fmt, x_TH.shape[0], x_TH.shape[1], DTYPE_NAMES[x_TH.dtype])
        return row_contiguous(x_TH)

    def _require(self, fmt: WireFormat, dtype: torch.dtype, device: torch.device) -> None:
        reason = self.why_not(fmt, dtype, device)
        if reason is not None:
            raise FcEvalError(f"the codec {self.name!r} cannot be used: {reason}")


class CpuCodec(NativeCodec):
    """C++ on the CPU: every format without a rounded scale."""

    name, device_type = "cpu", "cpu"


class CudaCodec(NativeCodec):
    """CUDA on the device of the tensors, on the current stream, without allocation in the kernel or host waits.

    It covers every format without a rounded scale; the fast kernels and the fused all-reduce are for groups of a power
    of two from 8 to 1024 elements without spikes, and mx scales of 8 bits.
    """

    name, device_type = "cuda", "cuda"

    def _why_not_in_one_pass(self, fmt: WireFormat) -> str | None:
        if fmt.group_size not in (8, 16, 32, 64, 128, 256, 512, 1024):
            return f"{fmt.name} has a group that is not a power of two from 8 to 1024 elements"
        if fmt.spikes:
            return f"{fmt.name} reserves spikes"
        if fmt.kind == "mx" and fmt.scale_bits != 8:
            return f"{fmt.name} has a scale of {fmt.scale_bits} bits, not of 8"
        return None


def cpu_codec() -> CpuCodec:
    """The CPU codec with the best instruction set of this machine; raises `CodecUnavailable` where it was not built."""
    return CpuCodec()


def cuda_codec() -> CudaCodec:
    """The CUDA codec; raises `CodecUnavailable` where it was not built or finds no device."""
    return CudaCodec()
