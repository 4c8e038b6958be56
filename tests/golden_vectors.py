"""Golden vectors: what they hold, made by the oracle. `scripts/make_golden.py` writes them, `test_golden.py` checks.

One npz file, all integers: `wire_version`, `input/DTYPE` [W, T, H] (the bits of the partial sums), then for every
format `wire/DTYPE/FORMAT` (bytes of rank 0's message) and `decoded/DTYPE/FORMAT` (SHA-256 of its fp32 bits), and for
every comm `reduced/DTYPE/W/COMM` [T, H] (bits) and `nonfinite/DTYPE/W/COMM` [stages].
"""

import hashlib
from pathlib import Path

import numpy as np
import oracle
import oracle_floats
import oracle_reduce
import torch
from cases import DISTRIBUTIONS, FORMATS

from fc_eval.codec.base import DTYPES
from fc_eval.collective.comm import parse_comm
from fc_eval.wire import WIRE_VERSION, parse_format

FILE = Path(__file__).parent / "golden" / f"wire_v{WIRE_VERSION}.npz"
RANKS, HIDDEN = 4, 300
ROWS = ["normal", "one_outlier", "subnormal", "nonfinite"]  # one row of each distribution
COMMS = [
    *("plain", "fp32_ordered", "int8", "int4", "int4_int8", "int4-g32-sym", "int3-g100-se/fp8_e4m3-g32"),
    *("one_step:int6", "one_step:fp4_e2m1-g32", "ring:int4-g32", "ring:int5-gtoken/int8-gtoken"),
    *("hierarchical@2:int4-g32", "hierarchical@2:int6-g9/int8-gtoken"),
    # Appended, so that the dtypes of those above stay: a comm gets the next dtype by its place.
    *("mxfp4", "one_step:mxfp8_e4m3", "ring:mxint4-g16-e4m0/mxfp6_e2m3-g16", "int2-g64-sr/int4-g32-sr"),
    *("int4-g32-had", "one_step:int3-g64-sr-had", "hierarchical@2:int4-gtoken-had/int8-g32"),
    "int2-g32-slog8-sr/int4-g32-slog8",
]


def bits_dtype(dtype_name: str) -> type[np.unsignedinteger]:
    return np.uint32 if dtype_name == "fp32" else np.uint16


def partials(dtype_name: str) -> torch.Tensor:
    """[W, T, H], drawn afresh; the file keeps them, because generators change."""
    gen = torch.Generator().manual_seed(WIRE_VERSION)
    rows = [DISTRIBUTIONS[name](gen, RANKS, HIDDEN, DTYPES[dtype_name]) for name in ROWS]
    return torch.stack(rows, dim=1).to(DTYPES[dtype_name])


def bits_of(values: torch.Tensor) -> np.ndarray:
    integers = values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    return integers.numpy().view(np.uint32 if values.dtype == torch.float32 else np.uint16)


def digest(fp32_bits: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(fp32_bits.astype("<u4").tobytes()).digest(), dtype=np.uint8)


def build(inputs: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """All arrays of the file; from the partial sums given (bits [W, T, H] per dtype), or from fresh ones."""
    inputs = inputs or {name: bits_of(partials(name)) for name in DTYPES}
    found: dict[str, np.ndarray] = {"wire_version": np.array(WIRE_VERSION)}
    rows = {}
    for dtype_name, bits in inputs.items():
        found[f"input/{dtype_name}"] = bits
        to_float = np.vectorize(lambda b, d=dtype_name: oracle_floats.from_bits(int(b), d), otypes=[np.float32])
        rows[dtype_name] = [[list(row) for row in rank] for rank in to_float(bits)]
    for index, name in enumerate(FORMATS):
        dtype_name = list(DTYPES)[index % len(DTYPES)]
        fmt, x = parse_format(name), rows[dtype_name][0]
        wire = oracle.encode(x, fmt, dtype_name)
        values, _ = oracle.decode(wire, fmt, len(x), HIDDEN, dtype_name)
        found[f"wire/{dtype_name}/{fmt.name}"] = np.frombuffer(wire, dtype=np.uint8)
        found[f"decoded/{dtype_name}/{fmt.name}"] = digest(np.array(values, dtype=np.float32).view(np.uint32))
    for index, name in enumerate(COMMS):
        dtype_name, comm = list(DTYPES)[index % len(DTYPES)], parse_comm(name)
        values, counts = oracle_reduce.all_reduce(rows[dtype_name], comm, dtype_name)
        reduced = [[oracle_floats.to_bits(v, dtype_name) for v in row] for row in values]
        key = f"{dtype_name}/{RANKS}/{comm.name}"
        found[f"reduced/{key}"] = np.array(reduced, dtype=bits_dtype(dtype_name))
        found[f"nonfinite/{key}"] = np.array(counts, dtype=np.int64)
    return found


def load(path: Path = FILE) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def differences(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> list[str]:
    """Keys that one side lacks or that hold something else."""
    return sorted(
        key
        for key in old.keys() | new.keys()
        if key not in old or key not in new or not np.array_equal(old[key], new[key])
    )
