"""Which codec a run gets: the best that covers it, and an error with the reason where one asked for cannot."""

import pytest
import torch

from fc_eval.codec import select
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.errors import FcEvalError
from fc_eval.wire import parse_format

INT4 = parse_format("int4")


class OnlyInt4(ReferenceCodec):
    """Stands for a native codec that covers one width."""

    name = "cpu"

    def why_not(self, fmt, dtype, device):
        return None if fmt.bits == 4 else f"{fmt.name} is not INT4"


def missing():
    raise select.CodecUnavailable("it was not built")


@pytest.fixture
def loaders(monkeypatch):
    """Replaces the table of codecs and forgets what was loaded."""

    def put(**table):
        monkeypatch.setattr(select, "LOADERS", table)
        select._load.cache_clear()

    yield put
    select._load.cache_clear()


def test_auto_takes_the_best_that_covers_everything(loaders):
    loaders(cuda=missing, cpu=OnlyInt4, reference=ReferenceCodec)
    codec, note = select.get_codec("auto", [INT4], torch.bfloat16, "cpu")
    assert (codec.name, note) == ("cpu", "codec cpu (cuda: it was not built)")
    codec, note = select.get_codec("auto", [INT4, parse_format("int8")], torch.bfloat16, "cpu")
    assert codec.name == "reference"
    assert note == "codec reference (cuda: it was not built; cpu: int8-g128-asym is not INT4)"


def test_a_codec_asked_for_is_never_replaced(loaders):
    loaders(cuda=missing, cpu=OnlyInt4, reference=ReferenceCodec)
    codec, note = select.get_codec("reference", [INT4], torch.bfloat16, "cpu")
    assert (codec.name, note) == ("reference", "codec reference")
    with pytest.raises(FcEvalError, match="codec cuda: it was not built"):
        select.get_codec("cuda", [INT4], torch.bfloat16, "cpu")
    with pytest.raises(FcEvalError, match="codec cpu: int8-g128-asym is not INT4"):
        select.get_codec("cpu", [parse_format("int8")], torch.bfloat16, "cpu")


def test_nothing_covers_it(loaders):
    loaders(cuda=missing, reference=ReferenceCodec)
    with pytest.raises(FcEvalError, match=r"no codec covers the run \(cuda: .*; reference: torch.float64"):
        select.get_codec("auto", [INT4], torch.float64, "cpu")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(FcEvalError, match="did you mean 'reference'"):
        select.get_codec("referenc", [INT4], torch.bfloat16, "cpu")


def test_a_module_without_the_factory_is_an_unavailable_codec(loaders):
    loaders(cpu=lambda: select._load_native("no_such_codec"), reference=ReferenceCodec)
    assert select.codecs_available() == {"cpu": "not part of this installation", "reference": None}


def test_the_reference_is_always_available():
    assert select.codecs_available()["reference"] is None
    codec, _ = select.get_codec("reference", [], torch.float16, "cpu")
    assert isinstance(codec, ReferenceCodec)


def test_flushed_subnormals_are_refused():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(FcEvalError, match="set_flush_denormal"):
            select.get_codec("reference", [INT4], torch.bfloat16, "cpu")
    finally:
        torch.set_flush_denormal(False)
    assert select.get_codec("reference", [INT4], torch.bfloat16, "cpu")[0].name == "reference"
