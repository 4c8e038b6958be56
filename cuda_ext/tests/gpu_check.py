"""Every kernel of the CUDA codec on small inputs, against the CPU codec byte for byte, without torch: for sanitizers.

    python cuda_ext/tests/gpu_check.py [--no-poison] [--plant out-of-bounds|uninitialized] [--simulated FOLDER]

Memory comes straight from the driver, one allocation of exactly its size per buffer, so that a tool sees the first byte
that is read or written beyond it; a caching allocator would hide that. Outputs are filled with a pattern before each
call, which shows bytes that no kernel writes; `--no-poison` leaves them uninitialized, for a tool that looks for that.
`--plant` makes one mistake on purpose, which shows that a tool sees such mistakes here. `--simulated` runs the kernels
on the host instead (`_native_cuda_sim` in FOLDER, built with -DFC_EVAL_TESTS=ON), to try this file without a GPU.
"""

import argparse
import contextlib
import ctypes
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fc_eval.codec.format_ints import format_ints  # noqa: E402
from fc_eval.wire.format import FORMATS, parse_format  # noqa: E402
from fc_eval.wire.layout import layout  # noqa: E402

NAMES = [f"int{bits}" for bits in range(2, 9)] + ["int4-sym", "int7-sym", "int4-se", "int8-se"]
NAMES += [name for name, fmt in FORMATS.items() if fmt.kind != "int"]
NAMES += ["int2-sr", "int5-se-sr", "fp4_e2m1-sr", "mxfp4-e5m0"]
# Those of the fast kernels, each with one of the general kernels in between.
GROUPS = (32, 96, 128, "token", 8, 9, 1024, 4096, 16, 256, 64, 512)
TILED = (8, 16, 32, 64, 128, 256, 512, 1024)
# Single elements and ends of rows on their own, rows that can and that cannot be read 16 bytes at a time, many tiles.
SHAPES = ((1, 1), (3, 20), (2, 136), (5, 300), (2, 1024), (9, 4096))
WIDTHS = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}
RANKS = 3
POISON = 0xAB


class HostMemory:
    """Allocations, and bytes to and from them; on the host, where the CPU codec and simulated kernels work."""

    def __init__(self) -> None:
        self._alive: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        """Address of exactly so many bytes."""
        buffer = ctypes.create_string_buffer(nbytes)
        self._alive[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, address: int) -> None:
        """Gives an allocation back."""
        del self._alive[address]

    def write(self, address: int, data: np.ndarray) -> None:
        """Copies contiguous data there."""
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Copies bytes back, after all kernels."""
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Sets every byte."""
        ctypes.memset(address, value, nbytes)


class DeviceMemory:
    """The same on the first GPU, through the driver (libcuda), in the context that the CUDA runtime uses too."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise SystemExit(f"{name} failed with CUDA error {status}")

    def allocate(self, nbytes: int) -> int:
        """See `HostMemory`."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        """See `HostMemory`."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, data: np.ndarray) -> None:
        """See `HostMemory`."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(data.ctypes.data), _size(data.nbytes))

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """See `HostMemory`."""
        self._call("cuCtxSynchronize")
        out = np.empty(nbytes, np.uint8)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(address), _size(nbytes))
        return out

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """See `HostMemory`."""
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), _size(nbytes))


_size = ctypes.c_size_t


class Side:
    """One codec and its memory: buffers by name, views of them as the extension wants them."""

    def __init__(
        self, module: Any, memory: HostMemory | DeviceMemory, device: int, how: tuple[Any, ...], poison: bool
    ) -> None:
        self.module, self.memory, self.device, self.how, self.poison = module, memory, device, how, poison
        self._allocated: list[int] = []

    def given(self, data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Any:
        """A view of a copy of the data."""
        view = self._view(dtype, shape, data.nbytes)
        if data.nbytes:
            self.memory.write(view[0], np.ascontiguousarray(data))
        return view

    def output(self, dtype: str, shape: tuple[int, ...], nbytes: int) -> Any:
        """A view of memory to be written."""
        view = self._view(dtype, shape, nbytes)
        if self.poison:
            self.memory.fill(view[0], POISON, nbytes)
        return view

    def _view(self, dtype: str, shape: tuple[int, ...], nbytes: int, allocated: int | None = None) -> Any:
        address = self.memory.allocate(max(1, nbytes if allocated is None else allocated))
        self._allocated.append(address)
        strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
        return address, self.module.DTYPES[dtype], self.device, shape, strides, nbytes

    def read(self, view: Any) -> np.ndarray:
        """The bytes of a view."""
        return self.memory.read(view[0], view[5])

    def done(self) -> None:
        """Frees everything."""
        while self._allocated:
            self.memory.free(self._allocated.pop())


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bits of ordinary values with a few of every other kind, NaN and Inf among them."""
    width = WIDTHS[dtype]
    shift = {"bf16": 7, "fp16": 10, "fp32": 23}[dtype]
    bits = rng.integers(0, 2 ** (8 * width().itemsize), shape, dtype=width)
    bias = {"bf16": 127, "fp16": 15, "fp32": 127}[dtype]
    exponent = rng.integers(bias - 3, bias + 2, shape).astype(width)
    ordinary = (bits & ~width(((1 << (8 * width().itemsize - 1 - shift)) - 1) << shift)) | exponent << width(shift)
    return np.where(rng.random(shape) < 0.01, bits, ordinary)


def results(side: Side, name: str, group: Any, dtype: str, shape: tuple[int, int], seed: int) -> Iterator[np.ndarray]:
    """Bytes of encode, decode, round trip and all-reduces, and the counts of non-finite groups."""
    module, fmt = side.module, parse_format(name).with_group(group)
    ints, size = format_ints(fmt, module), WIDTHS[dtype]().itemsize
    other = format_ints(parse_format("int8-g32" if group != 32 else "int5-g256-sym"), module)
    rng, elements = np.random.default_rng(seed), shape[0] * shape[1]
    x = side.given(values(rng, dtype, shape), dtype, shape)
    partials = side.given(values(rng, dtype, (RANKS, *shape)), dtype, (RANKS, *shape))
    nbytes = layout(fmt, *shape, dtype).total_bytes
    wire = side.output("uint8", (nbytes,), nbytes)
    module.encode(x, ints, wire, *side.how)
    yield side.read(wire)
    for call, source in ((module.decode, (wire, ints, module.DTYPES[dtype])), (module.round_trip, (x, ints))):
        out = side.output("fp32", shape, 4 * elements)
        yield from counted(side, call, (*source, out), 1, out)
    in_one_pass = group in TILED and not fmt.spikes and fmt.scale_bits in (0, 8)
    reduces = [("two_step", (ints, ints)), ("two_step", (ints, other)), ("one_step", (ints, ()))] if in_one_pass else []
    for algorithm, formats in (*reduces, ("fp32_ordered", ((), ()))):
        out = side.output(dtype, shape, size * elements)
        arguments = (partials, module.ALGORITHMS[algorithm], *formats, out)
        yield from counted(side, module.all_reduce, arguments, 2, out)
    side.done()


def counted(side: Side, call: Any, arguments: tuple[Any, ...], stages: int, out: Any) -> Iterator[np.ndarray]:
    """The result's bytes and the numbers of non-finite groups, which the CPU codec returns and a kernel adds up."""
    if side.module.__name__.endswith("_native"):
        found = call(*arguments, *side.how)
        yield side.read(out)
        yield np.array(found, np.int64).reshape(-1).view(np.uint8)
        return
    counts = side.given(np.zeros(stages, np.int64), "int64", (stages,))
    call(*arguments, counts, *side.how)
    yield side.read(out)
    yield side.read(counts)


def plant(side: Side, mistake: str) -> None:
    """One kernel with one mistake: the last 16 bytes of its output are not there, or nobody wrote its input."""
    module, shape, fmt = side.module, (4, 1024), parse_format("int4-g128")
    nbytes = layout(fmt, *shape, "bf16").total_bytes
    ints = format_ints(fmt, module)
    if mistake == "out-of-bounds":
        x = side.given(values(np.random.default_rng(0), "bf16", shape), "bf16", shape)
        module.encode(x, ints, side._view("uint8", (nbytes,), nbytes, nbytes - 16), *side.how)
        with contextlib.suppress(SystemExit):  # a tool that sees the mistake may have ended the context
            side.read(x)
    else:
        wire, out = side._view("uint8", (nbytes,), nbytes), side.output("fp32", shape, 4 * shape[0] * shape[1])
        counts = side.given(np.zeros(1, np.int64), "int64", (1,))
        module.decode(wire, ints, module.DTYPES["bf16"], out, counts, *side.how)
        side.read(out)


def main() -> int:
    """Returns 0 where everything is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-poison", action="store_true")
    parser.add_argument("--plant", choices=["out-of-bounds", "uninitialized"])
    parser.add_argument("--simulated", metavar="FOLDER")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th case only")
    given = parser.parse_args()
    if given.simulated:
        sys.path.insert(0, given.simulated)
        module = importlib.import_module("_native_cuda_sim")
        tested = Side(module, HostMemory(), module.CPU_DEVICE, (module.CPU_DEVICE, 0), not given.no_poison)
    else:
        module = importlib.import_module("fc_eval._native_cuda")
        if reason := module.why_no_device():
            raise SystemExit(f"no device: {reason}")
        tested = Side(module, DeviceMemory(), 0, (0, 0), not given.no_poison)
    if given.plant:
        plant(tested, given.plant)
        print(f"planted: {given.plant}")
        return 0
    cpu_module = importlib.import_module("fc_eval._native")
    expected = Side(cpu_module, HostMemory(), cpu_module.CPU_DEVICE, (1, ""), True)
    compared = differing = 0
    cases = zip(itertools.cycle(GROUPS), itertools.product(NAMES, WIDTHS, SHAPES))
    for seed, (group, (name, dtype, shape)) in enumerate(cases):
        if seed % given.every:
            continue
        pairs = zip(*(results(side, name, group, dtype, shape, seed) for side in (tested, expected)), strict=True)
        for step, (found, wanted) in enumerate(pairs):
            compared += wanted.nbytes
            if not np.array_equal(found[: wanted.nbytes], wanted):
                differing += 1
                print(f"{name} g{group} {dtype} {shape}: result {step} differs")
    print(f"{compared} bytes compared with the CPU codec, {differing} results differ")
    assert "torch" not in sys.modules
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
