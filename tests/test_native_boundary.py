"""The edge between Python and the native codecs: wrong arguments are exceptions, operators obey PyTorch's rules."""

import subprocess
import sys

import pytest
import torch
from cases import Case
from native_cases import require, same_bits

from fc_eval.codec import native_extension, native_ops
from fc_eval.codec.native import CpuCodec, cpu_codec, native_status
from fc_eval.codec.native_extension import EXTENSIONS, extension, format_ints, view_of
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.codec.select import CodecUnavailable, get_codec
from fc_eval.collective.comm import parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.wire import FORMATS, parse_format
from fc_eval.wire.layout import layout

INT4 = parse_format("int4-g32")
X = Case("int4", "bf16", 4, 96, "normal").values()


@pytest.fixture
def module():
    require("cpu")
    return extension("cpu")


def changed(view, **entries):
    names = ("pointer", "dtype", "device", "shape", "strides", "nbytes")
    return tuple(entries.get(name, value) for name, value in zip(names, view, strict=True))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"pointer": 0}, "null pointer"),
        ({"pointer": 3}, "misaligned"),
        ({"dtype": 9}, "unknown dtype"),
        ({"dtype": 3}, "expected bf16, fp16 or fp32"),
        ({"device": 0}, "on device 0"),
        ({"shape": (4, -96)}, "negative"),
        ({"shape": (4, 97)}, "beyond its storage"),
        ({"shape": (2**40, 2**40)}, "too many elements"),
        ({"strides": (96, 2)}, "contiguous"),
        ({"strides": (97, 1)}, "beyond its storage"),
        ({"strides": (2**62, 1)}, "beyond its storage"),
        ({"shape": (4, 96, 1)}, "2 entries"),
        ({"nbytes": 10}, "beyond its storage"),
    ],
)
def test_a_wrong_tensor_is_refused(module, entries, message):
    wire = torch.zeros(layout(INT4, 4, 96, "bf16").total_bytes, dtype=torch.uint8)
    view = changed(view_of(X, module), **entries)
    with pytest.raises(ValueError, match=message):
        module.encode(view, format_ints(INT4, module), view_of(wire, module), 1, "")


@pytest.mark.parametrize("bad", [7, "tensor", None, (1, 2)])
def test_something_else_than_a_tensor_is_refused(module, bad):
    out = torch.empty(4, 96)
    with pytest.raises((TypeError, ValueError)):
        module.round_trip(bad, format_ints(INT4, module), view_of(out, module), 1, "")


@pytest.mark.parametrize("value", [-1, 0, 1, 9, 5000, 2**31, 2**70, "4", None, 2.5])
def test_format_integers_out_of_range_are_refused(module, value):
    kept = torch.empty(4, 96)  # a view does not keep its tensor alive
    out, ints = view_of(kept, module), format_ints(INT4, module)
    refused = 0
    for index in range(len(ints)):
        wrong = (*ints[:index], value, *ints[index + 1 :])
        try:
            module.round_trip(view_of(X, module), wrong, out, 1, "")
        except (ValueError, TypeError, OverflowError):
            refused += 1
    # A small number in a single field may make another sound format (spikes, one group per token); others never do.
    assert refused >= (1 if value in (0, 1, 9) else len(ints))


def test_wrong_lengths_shapes_threads_and_sets_are_refused(module):
    ints, x = format_ints(INT4, module), view_of(X, module)
    short, good = torch.zeros(16, dtype=torch.uint8), torch.empty(4, 96)
    small, wrong, stacked = torch.empty(3, 96), torch.empty(4, 96).bfloat16(), X[None]
    with pytest.raises(ValueError, match="16 entries, expected"):
        module.encode(x, ints, view_of(short, module), 1, "")
    with pytest.raises(ValueError, match="not of the shape"):
        module.round_trip(x, ints, view_of(small, module), 1, "")
    with pytest.raises(ValueError, match="dtype bf16, expected fp32"):
        module.round_trip(x, ints, view_of(wrong, module), 1, "")
    with pytest.raises(ValueError, match="threads"):
        module.round_trip(x, ints, view_of(good, module), 0, "")
    with pytest.raises(ValueError, match="instruction set"):
        module.round_trip(x, ints, view_of(good, module), 1, "sse9")
    with pytest.raises(ValueError, match="algorithm"):
        module.all_reduce(view_of(stacked, module), 5, ints, ints, view_of(X, module), 1, "")


def test_the_codec_says_what_it_does_not_cover():
    require("cpu")
    codec, cpu = cpu_codec(), torch.device("cpu")
    assert codec.why_not(INT4, torch.bfloat16, cpu) is None
    assert all(codec.why_not(fmt, torch.float32, cpu) is None for fmt in FORMATS.values())
    assert "rounded scale" in codec.why_not(parse_format("int4-sfp16"), torch.bfloat16, cpu)
    assert "rotates" in codec.why_not(parse_format("int4-had"), torch.bfloat16, cpu)
    assert "float64" in codec.why_not(INT4, torch.float64, cpu)
    assert "cpu tensors" in codec.why_not(INT4, torch.bfloat16, torch.device("meta"))
    assert "ring" in codec.why_not_fused(parse_comm("ring:int4"), torch.bfloat16, cpu)
    with pytest.raises(FcEvalError, match="rounded scale"):
        codec.encode(X, parse_format("int4-sfp16"))
    with pytest.raises(FcEvalError, match="cannot be encoded"):
        codec.encode(X[0], INT4)
    with pytest.raises(FcEvalError, match="2 ranks or more"):
        codec.fused_all_reduce(X[None], parse_comm("int4"))
    with pytest.raises(FcEvalError, match="wire bytes are 7"):
        codec.decode(torch.zeros(7, dtype=torch.uint8), INT4, (4, 96), torch.bfloat16)


def test_auto_takes_the_native_codec():
    require("cpu")
    codec, note = get_codec("auto", [INT4], torch.bfloat16, "cpu")
    assert codec.name == "cpu"
    assert note.startswith("codec cpu")


def test_a_missing_extension_has_a_reason(monkeypatch):
    monkeypatch.setitem(EXTENSIONS, "cpu", "fc_eval._never_built")
    native_extension._load.cache_clear()
    try:
        assert "not built" in native_status()["cpu"]
        with pytest.raises(CodecUnavailable, match="not built"):
            CpuCodec()
    finally:
        native_extension._load.cache_clear()


OPERATORS = [
    (native_ops.encode, lambda i: (X, i, layout(INT4, 4, 96, "bf16").total_bytes, "")),
    (native_ops.decode, lambda i: (ReferenceCodec().encode(X, INT4), i, "bf16", 4, 96, "")),
    (native_ops.round_trip, lambda i: (X, i, "")),
    (native_ops.all_reduce, lambda i: (torch.stack([X, X]), "two_step", i, i, "")),
]


@pytest.mark.parametrize(("operator", "arguments"), OPERATORS, ids=["encode", "decode", "round_trip", "all_reduce"])
def test_operators_pass_opcheck(operator, arguments):
    require("cpu")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments(list(format_ints(INT4, extension("cpu")))), test_utils=checks)


def test_works_under_torch_compile():
    require("cpu")
    codec, comm = cpu_codec(), parse_comm("int4-g32")

    def layer(x):
        return codec.fused_all_reduce(torch.stack([x * 2, x + 1]), comm)[0] + codec.round_trip(x, INT4).values

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (4, 7):
        x = Case("int4", "bf16", tokens, 96, "normal").values()
        same_bits(compiled(x), layer(x), f"{tokens} tokens")


def test_names_that_operators_do_not_know_are_named(module):
    fmt, ops = format_ints(INT4, module), torch.ops.fc_eval
    with pytest.raises(FcEvalError, match="unknown dtype of a native codec 'int32'"):
        ops.native_encode(X.to(torch.int32), fmt, 16, "")
    wire = torch.zeros(layout(INT4, *X.shape, "bf16").total_bytes, dtype=torch.uint8)
    with pytest.raises(FcEvalError, match="unknown dtype of a native codec 'bf15': did you mean 'bf16'"):
        ops.native_decode(wire, fmt, "bf15", *X.shape, "")
    with pytest.raises(FcEvalError, match="unknown algorithm of a native codec 'two_steps': did you mean 'two_step'"):
        ops.native_all_reduce(X[None], "two_steps", fmt, fmt, "")


def test_gradients_do_not_pass_but_do_not_disturb():
    require("cpu")
    x = X.clone().requires_grad_()
    same_bits(cpu_codec().round_trip(x, INT4).values, cpu_codec().round_trip(X, INT4).values, "requires_grad")


def test_python_and_native_names_agree(module):
    assert set(module.FORMAT_FIELDS) == {
        *("kind", "bits", "group", "scheme", "exponent", "mantissa", "bias", "max_code", "emax", "scale_bits", "spikes")
    }
    assert module.DTYPES["uint8"] != module.DTYPES["bf16"]
    assert len(format_ints(parse_format("mxfp4"), module)) == len(module.FORMAT_FIELDS)


def test_the_extension_needs_no_torch():
    require("cpu")
    code = "import sys, importlib.util as u; " + (
        f"s = u.spec_from_file_location('_native', {extension('cpu').__file__!r}); m = u.module_from_spec(s); "
        "s.loader.exec_module(m); assert m.instruction_sets(); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
