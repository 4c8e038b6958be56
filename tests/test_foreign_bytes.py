"""Bytes that no encoder wrote: whatever they are, every NaN that a decoder gives is the canonical one."""

import pytest
import torch
from native_cases import require, same_round_trip
from simulated_codec import SimulatedCodec, why_not_simulated

from fc_eval.codec.base import DTYPES
from fc_eval.codec.native import cpu_codec
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.wire import parse_format
from fc_eval.wire.layout import layout

SHAPE = (61, 352)  # the last group of a row is short
FORMATS = [
    "int4-g32",
    "int8-g32-sym",
    "int3-g32-se",
    "int4-g32-sr",
    "int2-g128-sym-sr",
    "mxfp4-g32-sr",
    "int5-gtoken-sr",
]
# Signalling and quiet NaN of both signs, Inf, and usual values, as 16-bit words and as upper halves of fp32.
WORDS = [0x7C01, 0xFC01, 0x7F81, 0xFFFF, 0x7FC1, 0xFF81, 0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x3C00, 0x0000]


def foreign(fmt, dtype_name: str) -> torch.Tensor:
    """A message of which half the words are odd numbers, and the rest anything."""
    generator = torch.Generator().manual_seed(7)
    total = layout(fmt, *SHAPE, dtype_name).total_bytes
    odd = torch.tensor(WORDS, dtype=torch.int32)[torch.randint(len(WORDS), (total,), generator=generator)]
    anything = torch.randint(2**16, (total,), generator=generator, dtype=torch.int32)
    words = torch.where(torch.rand(total, generator=generator) < 0.5, odd, anything)
    return words.to(torch.int16).view(torch.uint8)[:total].clone()


def codecs():
    found = [ReferenceCodec()]
    try:
        require("cpu")
        found.append(cpu_codec())
    except pytest.skip.Exception:
        pass
    return found + ([] if why_not_simulated() else [SimulatedCodec()])


@pytest.mark.parametrize("dtype_name", sorted(DTYPES))
@pytest.mark.parametrize("name", FORMATS)
def test_every_nan_that_comes_out_is_canonical_and_codecs_agree(name, dtype_name):
    fmt, dtype = parse_format(name), DTYPES[dtype_name]
    wire = foreign(fmt, dtype_name)
    first, *others = [codec.decode(wire, fmt, SHAPE, dtype) for codec in codecs()]
    nan = first.values.isnan()
    assert nan.any()
    assert (first.values.view(torch.int32)[nan] == 0x7FC00000).all()
    for other in others:
        same_round_trip(other, first, f"{name} {dtype_name}")


def test_a_signalling_nan_spike_arrives_canonical():
    fmt, x = parse_format("int4-g8-sr"), torch.arange(8.0).half().view(1, 8)
    message = layout(fmt, 1, 8, "fp16")
    section = message.section("spikes")
    for codec in codecs():
        wire = ReferenceCodec().encode(x, fmt)
        wire[section.offset : section.offset + 2] = torch.tensor([0x01, 0xFC], dtype=torch.uint8)
        found = codec.decode(wire, fmt, (1, 8), torch.float16)
        assert found.values.view(torch.int32)[0, 0] == 0x7FC00000
        assert found.values[0, 1:].isfinite().all()
        assert int(found.nonfinite_groups) == 0
