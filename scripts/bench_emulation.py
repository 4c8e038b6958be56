"""What emulating quantized communication costs: a model's forward under `comm` over the same under `plain`, in one run.

    python scripts/bench_emulation.py --model smollm2 --comm int4 --tp 4

Appends to reports/bench/emulation.csv, one row per (comm, codec): seconds are medians over alternating repeats, so
that both sides see the same machine; `ratio` is seconds / seconds_plain.
"""

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

import torch

from fc_eval.errors import FcEvalError
from fc_eval.hydra_app import compose_one
from fc_eval.models.load import load_model
from fc_eval.parallel.emulate import communicate

COLUMNS = (
    "device",
    "model",
    "dtype",
    "comm",
    "tp",
    "codec",
    "seconds",
    "seconds_plain",
    "ratio",
    "tokens",
    "repeats",
    "torch",
)


def forward_seconds(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Wall time of one forward pass without a KV cache, the device's queue drained."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help="a name in conf/model")
    parser.add_argument("--path", help="model.path, where the model needs one")
    parser.add_argument("--comm", nargs="+", default=["int4"])
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--codec", nargs="+", default=["auto"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("reports/bench/emulation.csv"))
    given = parser.parse_args()
    overrides = [f"model={given.model}"] + ([f"model.path={given.path}"] if given.path else [])
    config = compose_one(overrides).model
    loaded = load_model(config, given.device)
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, given.tokens), generator=generator).to(given.device)
    device = torch.cuda.get_device_name() if given.device == "cuda" else f"cpu ({torch.get_num_threads()} threads)"

    rows = []
    for codec in given.codec:
        for comm in given.comm:
            times: dict[str, list[float]] = {"plain": [], comm: []}
            ran = ""
            for repeat in range(given.repeats + 1):
                for name in times:
                    with communicate(loaded.model, name, given.tp, codec) as attachment:
                        seconds = forward_seconds(loaded.model, ids)
                        ran = attachment.stats().codec or ran
                    if repeat:  # the first round warms up
                        times[name].append(seconds)
            seconds, seconds_plain = statistics.median(times[comm]), statistics.median(times["plain"])
            row = [device, given.model, config.dtype, comm, given.tp, ran, f"{seconds:.4f}", f"{seconds_plain:.4f}"]
            rows.append([*row, f"{seconds / seconds_plain:.3f}", given.tokens, given.repeats, torch.__version__])
            print(dict(zip(COLUMNS, rows[-1], strict=True)))
    fresh = not given.out.exists()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(COLUMNS)
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FcEvalError as error:
        sys.exit(f"error: {error}")
