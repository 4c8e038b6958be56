"""`fc-eval formats`: what the table says of a format."""

import re

import pytest
from test_cli import run_cli

from fc_eval.wire import FORMATS


def test_every_base_and_spikes_have_a_row(capsys):
    status, out, _ = run_cli(capsys, "formats")
    rows = [line.split("  ")[0] for line in out.splitlines()[1:-1]]
    assert status == 0
    assert rows[: len(FORMATS)] == [fmt.name for fmt in FORMATS.values()]
    assert "int2-g64-asym-sr" in rows
    assert "-sr" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("mxfp4", ["mxfp4-g32", "4.25", "4.5333", "3.53x"]),  # 2 rows of 480 are 30 groups of a block of 32
        ("int2-g64-sr", ["int2-g64-asym-sr", "3.25", "3.4667", "4.62x"]),  # 16 groups of which the last holds half
    ],
)
def test_bits_of_a_message_count_everything(capsys, name, cells):
    _, out, _ = run_cli(capsys, "formats", name, "--tokens", "2", "--hidden", "480")
    row = out.splitlines()[1].split()
    assert row[:4] == cells
    assert "reference" in row[4:]


def test_nominal_bits_that_depend_on_the_rows_say_for_which(capsys):
    _, out, _ = run_cli(capsys, "formats", "channelwise_int4", "zeropp_int4", "--tokens", "2", "--hidden", "64")
    by_column, flat = (re.split("  +", line) for line in out.splitlines()[1:])
    # A scale of 16 bits per column is a quarter of a bit in 64 rows and 8 bits in 2; the codes are 4 bits.
    assert by_column[:3] == ["channelwise_int4", "4.25 (T = H)", "12.0000"]
    assert "T = H" not in flat[1]


def test_codecs_that_cover_a_format(capsys):
    """A rounded scale is the reference's alone."""
    _, out, _ = run_cli(capsys, "formats", "int4-sfp16")
    assert out.splitlines()[1].split()[4:] == ["reference"]
