"""Bandwidth of the native codec beside a plain copy in the same run; bytes are checked first.

    python cuda_ext/tests/bench_codec.py [cuda|cpu] [--mib 64] [--formats int4-g32,int8-g128,...]

GB/s count every byte that must be read or written once: encode bf16 in and the message out, decode the message
in and fp32 out, two_step W partials in and one result out. CUDA times are medians over graph replays that rotate among
buffers larger than the L2 cache; CPU times are medians of wall-clock times.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fc_eval.codec.native import CpuCodec, CudaCodec, cpu_codec, cuda_codec
from fc_eval.codec.native_extension import format_ints, view_of
from fc_eval.collective.comm import parse_comm
from fc_eval.wire import parse_format
from fc_eval.wire.layout import layout

FORMATS = "int8-g32,int8-g128,int4-g32,int4-g128,int6-g128,int4-g128-sym,int4-g32-se,fp8_e4m3-g128,fp4_e2m1-g32"
HIDDEN, ROTATE, REPEATS = 4096, 4, 30


def time_us_cuda(calls: list[Callable[[], None]]) -> float:
    """Median time of one call; the calls work on different buffers."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def time_us_cpu(calls: list[Callable[[], None]]) -> float:
    """Median time of one call; the calls work on different buffers."""
    times = []
    for index in range(REPEATS):
        start = time.perf_counter()
        calls[index % len(calls)]()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[3:])


class Bench:
    """Calls the extension directly on buffers that exist already, so that only the kernels are timed."""

    def __init__(self, codec: CpuCodec | CudaCodec, device: str, mib: int) -> None:
        self.codec, self.device = codec, device
        self.module = codec._module
        self.tokens = (mib << 20) // (2 * HIDDEN)
        self.time_us = time_us_cuda if device == "cuda" else time_us_cpu
        self.x = [self._random(self.tokens, HIDDEN) for _ in range(ROTATE)]
        self.copy_gbs = self._copy()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(torch.bfloat16)

    def _how(self, *counters: torch.Tensor) -> tuple[object, ...]:
        if self.device == "cpu":
            return torch.get_num_threads(), ""
        views = tuple(view_of(counter, self.module) for counter in counters)
        return *views, torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream

    def _copy(self) -> float:
        out = [torch.empty_like(x) for x in self.x]
        pairs = list(zip(out, self.x, strict=True))
        time_us = self.time_us([lambda a=a, b=b: a.copy_(b) for a, b in pairs])  # type: ignore[misc]
        return 2 * self.x[0].numel() * 2 / time_us / 1e3

    def row(self, name: str, time_us: float, nbytes: int) -> None:
        """Prints one line of the table."""
        gbs = nbytes / time_us / 1e3
        print(f"{name:42s} {time_us:10.1f} us {gbs:8.0f} GB/s {gbs / self.copy_gbs:6.1%} of copy", flush=True)

    def codec_rows(self, name: str) -> None:
        """Encode and decode in one format."""
        fmt, module = parse_format(name), self.module
        ints, nbytes = format_ints(fmt, module), layout(fmt, self.tokens, HIDDEN, "bf16").total_bytes
        wires = [self.codec.encode(x, fmt) for x in self.x]
        out = [torch.empty(self.tokens, HIDDEN, device=self.device) for _ in self.x]
        count = torch.zeros(1, dtype=torch.int64, device=self.device)
        assert torch.equal(wires[0].cpu(), cpu_codec().encode(self.x[0].cpu(), fmt))
        pairs = list(zip(self.x, wires, strict=True))
        encode = [
            lambda x=x, w=w: module.encode(view_of(x, module), ints, view_of(w, module), *self._how()) for x, w in pairs
        ]
        self.row(f"encode {name}", self.time_us(encode), 2 * self.x[0].numel() + nbytes)  # type: ignore[arg-type]
        dtype = module.DTYPES["bf16"]
        backs = list(zip(wires, out, strict=True))
        decode = [
            lambda w=w, o=o: module.decode(view_of(w, module), ints, dtype, view_of(o, module), *self._how(count))
            for w, o in backs
        ]
        self.row(f"decode {name}", self.time_us(decode), 4 * self.x[0].numel() + nbytes)  # type: ignore[arg-type]
        same = self.codec.round_trip(self.x[0], fmt).values
        assert torch.equal(out[0], same)

    def reduce_row(self, name: str, ranks: int) -> None:
        """The emulated all-reduce of `ranks` partial sums in one launch."""
        comm, module = parse_comm(name), self.module
        tokens = max(1, self.tokens // ranks) if self.device == "cpu" else self.tokens
        partials = [self._random(ranks, tokens, HIDDEN) for _ in range(2)]
        out = [torch.empty_like(p[0]) for p in partials]
        count = torch.zeros(2, dtype=torch.int64, device=self.device)
        formats = [format_ints(fmt, module) if fmt else () for fmt in (comm.reduce, comm.gather)]
        algorithm = module.ALGORITHMS[comm.algorithm]
        calls = [
            lambda p=p, o=o: module.all_reduce(
                view_of(p, module), algorithm, *formats, view_of(o, module), *self._how(count)
            )
            for p, o in zip(partials, out, strict=True)
        ]
        nbytes = 2 * (ranks + 1) * out[0].numel()
        self.row(f"{name} W={ranks}", self.time_us(calls), nbytes)  # type: ignore[arg-type]
        expected, _ = cpu_codec().fused_all_reduce(partials[0][:, :64].cpu(), comm)
        assert torch.equal(out[0][:64].cpu(), expected)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--mib", type=int, default=64, help="size of one bf16 tensor")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument(
        "--comms", default="int4,int8,int4-g32,int8-g32,int4_int8,one_step:int4,fp8_e4m3-g128,fp32_ordered"
    )
    parser.add_argument("--ranks", default="2,4,8")
    options = parser.parse_args()
    bench = Bench(cuda_codec() if options.device == "cuda" else cpu_codec(), options.device, options.mib)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{where}, {bench.tokens} x {HIDDEN} bf16; copy {bench.copy_gbs:.0f} GB/s read + written")
    for name in options.formats.split(","):
        bench.codec_rows(name)
    for name in options.comms.split(","):
        for ranks in options.ranks.split(","):
            bench.reduce_row(name, int(ranks))


if __name__ == "__main__":
    main()
