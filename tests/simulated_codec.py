"""The CUDA kernels compiled as C++ on a simulated warp (cuda_ext/tests/simulated_warp.h), as a codec for CPU tensors.

They are the module `_native_cuda_sim`, built by `cmake -S cuda_ext -B BUILD -DFC_EVAL_TESTS=ON` into BUILD/tests; the
tests take it from PYTHONPATH.
"""

import importlib
import importlib.util

import torch

from fc_eval.codec.base import DTYPE_NAMES, RoundTrip
from fc_eval.codec.native import CudaCodec
from fc_eval.codec.native_extension import row_contiguous, view_of
from fc_eval.wire.layout import layout

SIMULATED = "_native_cuda_sim"


def why_not_simulated() -> str | None:
    """None where the module is on the path, otherwise what to do."""
    if importlib.util.find_spec(SIMULATED) is not None:
        return None
    return f"the simulated kernels are not on the path: build {SIMULATED} with -DFC_EVAL_TESTS=ON"


class SimulatedCodec(CudaCodec):
    """The kernels on a simulated warp, on CPU tensors. Outputs are poisoned, so that an unwritten value shows."""

    device_type = "cpu"

    def __init__(self):
        self.isa, self._module = "", importlib.import_module(SIMULATED)

    def _view(self, tensor):
        return view_of(tensor, self._module)

    def _call(self, function, *arguments):
        getattr(self._module, function)(*arguments, self._module.CPU_DEVICE, 0)

    def encode(self, x_TH, fmt):
        x_TH = row_contiguous(x_TH)
        wire = torch.full((layout(fmt, *x_TH.shape, DTYPE_NAMES[x_TH.dtype]).total_bytes,), 0xAB, dtype=torch.uint8)
        self._call("encode", self._view(x_TH), self._ints(fmt), self._view(wire))
        return wire

    def decode(self, wire, fmt, shape, dtype):
        out, count = torch.full(shape, 7.0), torch.zeros(1, dtype=torch.int64)
        code = self._module.DTYPES[DTYPE_NAMES[dtype]]
        self._call("decode", self._view(wire), self._ints(fmt), code, self._view(out), self._view(count))
        return RoundTrip(out, count[0])

    def round_trip(self, x_TH, fmt):
        x_TH = row_contiguous(x_TH)
        out, count = torch.full(x_TH.shape, 7.0), torch.zeros(1, dtype=torch.int64)
        self._call("round_trip", self._view(x_TH), self._ints(fmt), self._view(out), self._view(count))
        return RoundTrip(out, count[0])

    def fused_all_reduce(self, partials_WTH, comm):
        partials_WTH = row_contiguous(partials_WTH)
        out = torch.full(partials_WTH.shape[1:], 7.0, dtype=partials_WTH.dtype)
        counts = torch.zeros(2, dtype=torch.int64)
        formats = [self._ints(fmt) if fmt is not None else () for fmt in (comm.reduce, comm.gather)]
        algorithm = self._module.ALGORITHMS[comm.algorithm]
        self._call("all_reduce", self._view(partials_WTH), algorithm, *formats, self._view(out), self._view(counts))
        return out, counts[: {"two_step": 2, "one_step": 1, "fp32_ordered": 0}[comm.algorithm]]
