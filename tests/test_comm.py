"""Names of comms: what the short ones mean, that full ones read back, what is refused."""

import pytest

from fc_eval.collective.comm import BASELINE, Comm, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.wire import parse_format

NAMES = {
    "int4": "two_step:int4-g128-asym",
    "int4_int8": "two_step:int4-g128-asym/int8-g128-asym",
    "int4/int8-g32-sym": "two_step:int4-g128-asym/int8-g32-sym",
    "fp8_e4m3": "two_step:fp8_e4m3-g128",
    "int4_fp8_e4m3": "two_step:int4-g128-asym/fp8_e4m3-g128",
    "mxfp4": "two_step:mxfp4-g32",
    "mxfp4_int8": "two_step:mxfp4-g32/int8-g128-asym",
    "mxfp8_e4m3-e5m0": "two_step:mxfp8_e4m3-g32-e5m0",
    "one_step:int6-g32": "one_step:int6-g32-asym",
    "ring:int4-gtoken": "ring:int4-gtoken-asym",
    "hierarchical@4:int4_int8": "hierarchical@4:int4-g128-asym/int8-g128-asym",
    "fp32_ordered": "fp32_ordered",
    "plain": "plain",
    "ring_int4": "ring:int4-g128-asym",
    "one_step_int6-sym": "one_step:int6-g128-sym",
    "hierarchical_int4_int8": "hierarchical@2:int4-g128-asym/int8-g128-asym",
}


@pytest.mark.parametrize(("short", "full"), NAMES.items())
def test_names(short, full):
    comm = parse_comm(short)
    assert comm.name == full
    assert parse_comm(full) == comm
    assert parse_comm(comm) is comm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int44", "unknown comm 'int44': did you mean 'int4'"),
        ("ring_itn4", "unknown comm 'ring_itn4': did you mean 'ring_int4'"),
        ("one_step_int4/int8", "no gather stage"),
        ("plain_int4", "does not quantize"),
        ("two_stp:int4", "did you mean 'two_step'"),
        ("one_step:int4/int8", "no gather stage: leave out the gather format"),
        ("plain:int4", "does not quantize"),
        ("two_step", "needs a reduce format"),
        ("hierarchical:int4", "needs node_size"),
        ("hierarchical@x:int4", "node size 'x'"),
        ("two_step@2:int4", "has no nodes"),
        ("ring:int4-g32/int8-g64", "same group size"),
    ],
)
def test_impossible_names_say_why(text, message):
    with pytest.raises(FcEvalError, match=message):
        parse_comm(text)


def test_labels_for_tables():
    assert parse_comm("int4").label == "INT4 g128"
    assert parse_comm("int4_int8").label == "INT6 (INT4 reduce, INT8 gather) g128"
    assert parse_comm("one_step:int6-g32").label == "one-step INT6 g32"
    assert parse_comm("mxfp4").label == "MXFP4 g32"
    assert parse_comm("int2-g64-sr").label == "INT2 g64-sr"
    assert parse_comm("hierarchical@4:int4").label == "hierarchical@4 INT4 g128"
    assert BASELINE.label == "baseline (fp32 ordered)"


def test_a_group_size_goes_into_every_stage():
    assert parse_comm("int4_int8").with_group(32).name == "two_step:int4-g32-asym/int8-g32-asym"
    assert parse_comm("one_step:int4").with_group("token").name == "one_step:int4-gtoken-asym"
    with pytest.raises(FcEvalError, match="does not quantize"):
        BASELINE.with_group(32)


def test_formats_that_a_codec_must_cover():
    int4, int8 = parse_format("int4"), parse_format("int8")
    assert Comm("two_step", int4, int8).formats == (int4, int8)
    assert Comm("two_step", int4, int4).formats == (int4,)
    assert BASELINE.formats == ()
    assert parse_comm("int4").is_quantized
    assert not BASELINE.is_quantized
