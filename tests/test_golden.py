"""The golden vectors that are checked in: the reference still gives them, and so does the oracle."""

import runpy
import subprocess
import sys
from pathlib import Path

import golden_vectors as golden
import numpy as np
import pytest
import torch

from fc_eval.codec.base import DTYPES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.wire import WIRE_VERSION, parse_format

CODEC = ReferenceCodec()
VECTORS = golden.load()
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_golden.py"


def partials(dtype_name: str) -> torch.Tensor:
    """[W, T, H] as stored."""
    bits = VECTORS[f"input/{dtype_name}"]
    signed = bits.view(np.int32 if bits.dtype == np.uint32 else np.int16)
    return torch.from_numpy(signed.copy()).view(DTYPES[dtype_name])


def keys(kind: str) -> list[str]:
    return [key.removeprefix(f"{kind}/") for key in VECTORS if key.startswith(f"{kind}/")]


def test_the_file_is_of_this_version_and_small():
    assert VECTORS["wire_version"] == WIRE_VERSION
    assert golden.FILE.stat().st_size < 300_000
    assert len(keys("wire")) == len(golden.FORMATS)
    assert len(keys("reduced")) == len(golden.COMMS)


@pytest.mark.parametrize("key", keys("wire"))
def test_reference_gives_the_bytes(key):
    dtype_name, name = key.split("/", 1)
    fmt, x = parse_format(name), partials(dtype_name)[0]
    wire = CODEC.encode(x, fmt)
    assert np.array_equal(wire.numpy(), VECTORS[f"wire/{key}"])
    values = CODEC.decode(torch.from_numpy(VECTORS[f"wire/{key}"].copy()), fmt, tuple(x.shape), x.dtype).values
    assert np.array_equal(golden.digest(golden.bits_of(values)), VECTORS[f"decoded/{key}"])


@pytest.mark.parametrize("key", keys("reduced"))
def test_reference_gives_the_reduced_values(key):
    dtype_name, world_size, name = key.split("/", 2)
    result = all_reduce(partials(dtype_name), parse_comm(name), CODEC)
    assert int(world_size) == len(partials(dtype_name))
    assert np.array_equal(golden.bits_of(result.values), VECTORS[f"reduced/{key}"])
    assert result.nonfinite_groups.tolist() == VECTORS[f"nonfinite/{key}"].tolist()


def test_oracle_gives_them_and_the_script_overwrites_nothing(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "vectors.npz"
    inputs = {key.removeprefix("input/"): array for key, array in VECTORS.items() if key.startswith("input/")}
    built = golden.build(inputs)
    assert not golden.differences(built, VECTORS)

    def build_once(given):  # the oracle is slow, and what it gives depends on its inputs alone
        assert given.keys() == inputs.keys()
        assert all(np.array_equal(given[key], inputs[key]) for key in inputs)
        return built

    def script(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(copy), *options])
        status = runpy.run_path(str(SCRIPT))["main"]()
        return status, *capsys.readouterr()

    monkeypatch.setattr(golden, "build", build_once)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts folders in front
    copy.write_bytes(golden.FILE.read_bytes())
    status, out, _ = script()
    assert status == 0
    assert "unchanged" in out

    altered = dict(VECTORS)
    key = next(key for key in altered if key.startswith("wire/"))
    altered[key] = altered[key] ^ 1
    np.savez_compressed(copy, **altered)
    before = copy.read_bytes()
    status, _, error = script()
    assert status == 1
    assert key in error
    assert copy.read_bytes() == before
    assert script("--overwrite")[0] == 0
    assert not golden.differences(golden.load(copy), VECTORS)

    del altered[key]
    np.savez_compressed(copy, **altered)
    assert "1 added, 0 changed" in script()[1]
    assert not golden.differences(golden.load(copy), VECTORS)
    assert subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True).returncode == 0  # as users start it
