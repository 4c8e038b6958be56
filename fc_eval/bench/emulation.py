"""What emulating quantized communication costs: a model's forward under a comm over the same under `plain`, in one run.

    fc-eval bench emulation model=smollm2 comm=int4,int8 tp=4 device=cuda
    fc-eval bench emulation shape=llama3_8b layers=2 comm=int4 tp=8 device=cuda

One forward pass of `tokens` tokens without a KV cache. Under both comms the row-parallel layers are split over W ranks,
so the ratio is what quantizing adds and not what splitting does. The two take turns, and medians are kept: both see the
same machine. Adds one row per (comm, W, codec) to the CSV file; rows with the same key are replaced.

`shape=NAME` takes the layer shapes of a model of conf/model and draws random weights, so that nothing is fetched; time
does not depend on the values. A few layers are enough: every decoder layer has the same shapes and the same two
all-reduces and runs after the one before it, so L layers take L times as long under either comm, and the ratio stays.
The vocabulary is tiny, because embedding and head have no all-reduce: the ratio is that of the layers, and with its own
head a whole model has a slightly smaller one.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fc_eval.bench.machine import device_name, device_of, use_threads
from fc_eval.bench.table import Row, merge_csv, rows_to_keep, text_table
from fc_eval.codec.base import DTYPES
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError, unknown
from fc_eval.models.config import WEIGHTS
from fc_eval.models.half_products import half_products
from fc_eval.models.tiny import tiny_model
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.sites import find_decoder
from fc_eval.quantized import load
from fc_eval.weights.linear import quantize_

COLUMNS = (
    *("device", "model", "dtype", "comm", "tp", "codec", "seconds", "seconds_plain", "ratio", "tokens", "repeats"),
    "torch",
)
KEY = ("device", "model", "dtype", "comm", "tp", "codec", "tokens")


@dataclass(frozen=True)
class EmulationBenchOptions:
    """What `fc-eval bench emulation` is asked for."""

    model: str = field(default="smollm2", metadata={"help": "a name in conf/model"})
    path: str | None = field(default=None, metadata={"help": "model.path, where the model needs one"})
    shape: str | None = field(default=None, metadata={"help": "instead of model: layer shapes, random weights"})
    layers: int = field(default=2, metadata={"help": "decoder layers, with shape"})
    dtype: str = field(default="bf16", metadata={"help": "with shape: bf16, fp16 or fp32"})
    weights: str = field(default="native", metadata={"help": "native, or w8a8 (not smoothed: time is the same)"})
    comm: tuple[str, ...] = field(default=("int4",), metadata={"help": "comms, as in `fc-eval run comm=`"})
    tp: tuple[int, ...] = field(default=(4,), metadata={"help": "W, emulated ranks"})
    codec: tuple[str, ...] = field(default=("auto",), metadata={"help": "auto, reference, cpu or cuda"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    tokens: int = field(default=2048, metadata={"help": "of one forward pass"})
    repeats: int = field(default=7, metadata={"help": "of each of the two, after one that warms up"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: torch's)"})
    out: Path = field(default=Path("bench/emulation.csv"), metadata={"help": "CSV file"})

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.weights not in WEIGHTS:
            raise unknown("weights", self.weights, WEIGHTS)
        for name in ("layers", "tokens", "repeats"):
            if getattr(self, name) < 1:
                raise FcEvalError(f"{name}={getattr(self, name)} is not possible: expected 1 or more")
        if any(world_size < 2 for world_size in self.tp):
            raise FcEvalError(f"tp={self.tp} is not possible: one rank reduces nothing, expected 2 or more")


def bench_emulation(options: EmulationBenchOptions, command: str) -> int:
    """Measures, prints and writes.

    Raises:
        FcEvalError: a model, comm, codec or device that is not possible.
    """
    device = device_of(options.device)
    rows_to_keep(options.out, COLUMNS)
    use_threads(options.threads)
    model, name, dtype = _model(options)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (1, options.tokens), generator=torch.Generator().manual_seed(0)).to(device)
    rows: list[Row] = []
    for world_size in options.tp:
        for codec in options.codec:
            for comm in options.comm:
                seconds, seconds_plain, ran = _alternate(model, ids, comm, world_size, codec, options.repeats)
                row = (
                    *(device_name(device), name, dtype, comm, str(world_size), ran, f"{seconds:.6f}"),
                    *(f"{seconds_plain:.6f}", f"{seconds / seconds_plain:.3f}", str(options.tokens)),
                    *(str(options.repeats), torch.__version__),
                )
                rows.append(dict(zip(COLUMNS, row, strict=True)))
                merge_csv(options.out, COLUMNS, KEY, rows[-1:])
    print(text_table(COLUMNS, rows))
    print(f"written: {options.out}")
    return 0


def _model(options: EmulationBenchOptions) -> tuple[PreTrainedModel, str, str]:
    """The model on its device, its name and its dtype for the table."""
    label = "" if options.weights == "native" else f", {options.weights}"
    if options.shape is None:
        overrides = [f"model={options.model}", f"model.weights={options.weights}", "model.smoothing=null"]
        config = compose_one([*overrides, *([f"model.path={options.path}"] if options.path else [])]).model
        return load(config, options.device).model, f"{options.model}{label}", config.dtype
    shape = compose_one([f"model={options.shape}"]).model.shape
    if shape is None:
        raise FcEvalError(f"shape={options.shape} is not possible: conf/model/{options.shape}.yaml lists no sizes")
    model = tiny_model(replace(shape, layers=options.layers), dtype=DTYPES[options.dtype])
    name = f"{options.shape} shape ({options.layers} layers, random weights{label})"
    model = model.to(options.device)
    if options.weights == "w8a8":
        quantize_(find_decoder(model))
    return model, name, options.dtype


def _alternate(
    model: torch.nn.Module, ids: torch.Tensor, comm: str, world_size: int, codec: str, repeats: int
) -> tuple[float, float, str]:
    """Median seconds of a forward under `comm` and under `plain`, and the codec that ran."""
    times: dict[str, list[float]] = {"plain": [], comm: []}
    ran = ""
    for repeat in range(repeats + 1):
        for name in times:
            attached = communicate(model, name, world_size, codec)
            with half_products(model), attached as attachment, torch.inference_mode(), _clock() as clock:
                model(input_ids=ids, use_cache=False)
            ran = attachment.stats().codec or ran
            if repeat:  # the first round warms up
                times[name] += clock
    return statistics.median(times[comm]), statistics.median(times["plain"]), ran


@contextmanager
def _clock() -> Iterator[list[float]]:
    """Wall time of a block in seconds, the queue of a GPU drained before and after."""
    seconds: list[float] = []
    _drain()
    started = time.perf_counter()
    yield seconds
    _drain()
    seconds.append(time.perf_counter() - started)


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
