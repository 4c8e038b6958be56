"""The native code under sanitizers, and builds that break the contract, which the equality check must catch.

Needs a C++ compiler, not the package's own build.
"""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import Case
from native_build import HONEST, SANITIZED, SOURCES, build, require_flags
from native_cases import beside_extremes, same_bits

from fc_eval.codec.base import DTYPE_NAMES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.wire import parse_format
from fc_eval.wire.layout import layout

X86 = platform.machine() in ("x86_64", "AMD64")
# Every n-th of the driver's 66 x 8 x 3 x 8 cases, with which it has no common divisor: all formats, groups, dtypes and
# shapes still occur, not all together.
EVERY = 13


def test_cpu_codec_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    # One instruction set: the others are the same source, and a build of all of them takes minutes (FC_EVAL_SANITIZE).
    require_flags(*SANITIZED)
    jobs = {
        SOURCES / "cpu" / "kernels.cpp": (*HONEST, "-DFC_ISA=baseline"),
        SOURCES / "cpu" / "codec.cpp": HONEST[:1],
        SOURCES / "tests" / "cpu_driver.cpp": (),
    }
    driver = build(tmp_path, "cpu_driver", jobs, *SANITIZED)
    ran = subprocess.run([driver, str(EVERY)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    passed, failed = ran.stdout.split()[-4], ran.stdout.split()[-2]
    assert int(passed) == -(-66 * 8 * 3 * 8 // EVERY)
    assert failed == "0"


Shim = Callable[[torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]


def load_shim(path: Path) -> Shim:
    """values [T, H], format name -> (wire bytes, fp32 values), both from the library at `path`."""
    library = ctypes.CDLL(str(path))
    library.asym_shim.restype = ctypes.c_int64
    pointers = [ctypes.c_void_p] * 3
    library.asym_shim.argtypes = [*[ctypes.c_int32] * 3, *[ctypes.c_int64] * 2, *pointers]

    def run(x, name):
        fmt = parse_format(name)
        wire = torch.empty(layout(fmt, *x.shape, DTYPE_NAMES[x.dtype]).total_bytes, dtype=torch.uint8)
        out = torch.empty(x.shape)
        sizes = fmt.bits, fmt.group_size, x.dtype == torch.float32, *x.shape
        assert library.asym_shim(*sizes, x.data_ptr(), wire.data_ptr(), out.data_ptr()) >= 0
        return wire, out

    return run


def equality_check(shim: Shim) -> None:
    """What the tests of the native codecs do, on values with many ties and many magnitudes."""
    reference = ReferenceCodec()
    inputs = [Case("int4", dtype, 64, 4096, kind).values() for dtype in ("bf16", "fp32") for kind in ("normal", "ties")]
    for x in (*inputs, beside_extremes(torch.bfloat16)):
        for name in ("int8-g8", "int4-g32", "int5-g128"):
            wire, values = shim(x, name)
            same_bits(wire, reference.encode(x, parse_format(name)), f"{name} wire")
            same_bits(values, reference.round_trip(x, parse_format(name)).values, f"{name} values")


def shim_of(folder: Path, *flags: str, tree: Path = SOURCES) -> Shim:
    return load_shim(build(folder, "shim.so", {tree / "tests" / "asym_shim.cpp": flags}, "-shared", "-fPIC", tree=tree))


def test_flags_are_those_of_the_package():
    text = (SOURCES / "cpu" / "CMakeLists.txt").read_text()
    for flag in (*HONEST, "-march=x86-64-v3", "-march=x86-64-v4"):
        assert flag in text


def test_the_contract_s_flags_pass_the_equality_check(tmp_path):
    equality_check(shim_of(tmp_path, "-O2", *HONEST))


def test_contraction_fails_the_equality_check(tmp_path):
    contracting = ["-ffp-contract=fast", *(["-march=haswell"] if X86 else [])]
    require_flags(*contracting)
    if X86 and " fma " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no fused multiply-add")
    with pytest.raises(pytest.fail.Exception, match="differ"):
        equality_check(shim_of(tmp_path, "-O2", *contracting))


# Mistakes that a reader would hardly see: mathematically the same, other roundings.
SKEWED = {
    "the encoder divides by the range itself": (
        "Scale s = scale(q, m);\n    s.inverse = usable_inverse(s.step);",
        "Scale s = scale(q, m);\n    s.inverse = mul(q.top, usable_inverse(add(m.second, -m.first)));",
    ),
    "the step is a quotient": ("mul(add(m.second, -m.first), q.factor)", "add(m.second, -m.first) / q.top"),
    "ties are rounded up": ("add(mul(add(x, -s.low), s.inverse), kRounder)", "floor_plus_half(s, x)"),
}
HALF_UP = """
FC_FN float floor_plus_half(const Scale& s, float x) {
  return add(static_cast<float>(static_cast<int32_t>(add(mul(add(x, -s.low), s.inverse), 0.5f))), kRounder);
}

struct Asym {"""


@pytest.mark.parametrize("mistake", SKEWED)
def test_an_encoder_with_another_scale_or_rounding_fails_the_equality_check(mistake, tmp_path):
    tree = tmp_path / "cuda_ext"
    for part in ("cpu", "include", "tests"):
        shutil.copytree(SOURCES / part, tree / part)
    header = tree / "include" / "fc" / "group.h"
    text = header.read_text()
    right, wrong = SKEWED[mistake]
    start, end = text.index("struct Asym {"), text.index("// sym and signed-extreme")
    asym = text[start:end]
    assert asym.count(right) == 1, "group.h has changed: adapt this test"
    asym = asym.replace(right, wrong)
    header.write_text(text[:start] + asym.replace("struct Asym {", HALF_UP.lstrip(), 1) + text[end:])
    with pytest.raises(pytest.fail.Exception, match="differ"):
        equality_check(shim_of(tmp_path, "-O2", *HONEST, tree=tree))
