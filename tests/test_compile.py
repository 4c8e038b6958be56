"""A compiled model gives the bytes of an eager one: compiled arithmetic would round elsewhere than WIRE.md says."""

import shutil
import sys

import pytest
import torch
from conftest import attach, logits, random_values

import fc_eval
from fc_eval.models.config import Shape
from fc_eval.models.tiny import tiny_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torch.compile needs another compiler there")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")

# Their sums and scales are rounded to 16 bits between operations that inductor would fuse.
COMMS = ["plain", "fp32_ordered", "int4-g32", "int6-g32-sym-sbf16", "int8-sfp16", "ring:int4-g32-sfp16"]
FORMATS = ["int4-g32", "int4-g32-sfp16", "int8-g32-sbf16-zint16", "fp6_e3m2-g32-sbf16"]


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch.compiler.reset()


@needs_compiler
@pytest.mark.parametrize("comm", COMMS)
def test_a_compiled_layer_reduces_to_the_same_bits(tiny_bf16, comm):
    module, x = tiny_bf16.model.layers[0].mlp.down_proj, random_values(3, 2, 9, 384, dtype="bfloat16")
    compiled = torch.compile(module)
    with torch.inference_mode(), attach(tiny_bf16, comm, 4) as attachment:
        assert torch.equal(compiled(x), module(x))
        assert attachment.stats().calls["model.layers.0.mlp.down_proj"] == 2


@needs_compiler
@pytest.mark.parametrize("fmt", FORMATS)
def test_compiled_calls_of_the_library_give_the_same_bytes(fmt):
    x = random_values(4, 9, 192, dtype="bfloat16")

    def there_and_back(x):
        wire = fc_eval.encode(x, fmt, "reference")
        return wire, fc_eval.decode(wire, fmt, x.shape, x.dtype, "reference")

    for found, expected in zip(torch.compile(there_and_back)(x), there_and_back(x), strict=True):
        assert torch.equal(found, expected)


@needs_compiler
@pytest.mark.parametrize("comm", COMMS)
def test_a_compiled_all_reduce_gives_the_same_bits(comm):
    partials = random_values(5, 4, 9, 192, dtype="bfloat16")
    for codec in ("reference", "auto"):

        def reduce(partials, codec=codec):
            return fc_eval.all_reduce(partials, comm, codec)

        assert torch.equal(torch.compile(reduce)(partials), reduce(partials))


def test_compiled_code_follows_the_model_into_the_block_and_out_of_it(token_ids):
    model = tiny_model(Shape(layers=1, hidden=64, intermediate=64, heads=2, kv_heads=2))
    # The backend that leaves all operations as they are: inductor would change the layers around the all-reduce.
    compiled = torch.compile(model, backend="eager")
    plain = logits(model, token_ids)
    assert torch.equal(logits(compiled, token_ids), plain)
    with attach(compiled, "int4", 2) as attachment:
        quantized = logits(compiled, token_ids)
        attachment.check_calls()
    assert torch.equal(logits(compiled, token_ids), plain)
    assert not torch.equal(quantized, plain)
    with attach(model, "int4", 2):
        assert torch.equal(logits(model, token_ids), quantized)


def test_code_compiled_inside_the_block_does_not_communicate_outside(tiny):
    mlp, x = tiny.model.layers[0].mlp, random_values(6, 1, 9, 192)
    with torch.inference_mode():
        plain = mlp(x)
        with attach(tiny, "int4", 2) as attachment:
            compiled = torch.compile(mlp, backend="eager")
            assert torch.equal(compiled(x), mlp(x))
            assert attachment.stats().calls["model.layers.0.mlp.down_proj"] == 2
        assert torch.equal(compiled(x), plain)


def test_one_whole_graph_is_refused_with_the_reason():
    compiled = torch.compile(lambda x: fc_eval.encode(x, "int4"), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="rounds elsewhere than WIRE"):
        compiled(torch.zeros(2, 32))
