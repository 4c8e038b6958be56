"""The reference gives the same bits on a GPU as on the CPU."""

import pytest
import torch
from cases import COMMS, FORMATS, Case, codec_cases

from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm

CODEC = ReferenceCodec()
pytestmark = pytest.mark.gpu


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_and_values(name):
    for case in codec_cases([name]):
        x = case.values()
        wire, wire_cuda = CODEC.encode(x, case.fmt), CODEC.encode(x.cuda(), case.fmt)
        assert torch.equal(wire, wire_cuda.cpu()), case
        expected = CODEC.round_trip(x, case.fmt)
        for got in (
            CODEC.round_trip(x.cuda(), case.fmt),
            CODEC.decode(wire_cuda, case.fmt, (case.tokens, case.hidden), case.dtype),
        ):
            assert torch.equal(bits_of(got.values), bits_of(expected.values)), case
            assert got.nonfinite_groups.item() == expected.nonfinite_groups.item(), case


@pytest.mark.parametrize(("name", "world_size"), COMMS)
def test_reduced_values(name, world_size):
    for distribution in ("normal", "signed_zeros", "subnormal", "top", "nonfinite"):
        partials = Case("int4", "bf16", 5, 300, distribution).partials(world_size)
        expected, got = (all_reduce(x, parse_comm(name), CODEC) for x in (partials, partials.cuda()))
        assert torch.equal(bits_of(got.values), bits_of(expected.values)), distribution
        assert torch.equal(got.nonfinite_groups.cpu(), expected.nonfinite_groups), distribution
