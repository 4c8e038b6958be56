"""The benches: bytes are checked before anything counts, rows of other machines stay, options are read strictly."""

import csv
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_cli import run_cli

from fc_eval.bench import codec as codec_bench
from fc_eval.bench import emulation
from fc_eval.bench.bytes import awkward_values, check_small, same_bytes
from fc_eval.bench.operations import POISON, Problem, result_of, writes_into_buffers
from fc_eval.bench.options import describe_options, read_options
from fc_eval.bench.table import merge_csv, text_table
from fc_eval.bench.timing import MOST_SETS, Timed, median_times_us, sets_of_buffers
from fc_eval.codec.native import CudaCodec
from fc_eval.codec.native_extension import native_status
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.errors import FcEvalError
from fc_eval.wire import parse_format

CPU = torch.device("cpu")
OPS = [("encode", None), ("decode", None), ("qdq", None), ("two_step", 3)]


def problem(op="qdq", ranks=None, fmt="int4-g32", dtype=torch.bfloat16):
    return Problem(op, parse_format(fmt), 8, 4096, dtype, ranks)


class OneBitWrong(ReferenceCodec):
    """Wrong in the last bit of one value or of one byte of a message."""

    def encode(self, x_TH, fmt):
        wire = super().encode(x_TH, fmt)
        wire[100] ^= 1
        return wire

    def decode(self, wire, fmt, shape, dtype):
        return self._spoilt(super().decode(wire, fmt, shape, dtype))

    def round_trip(self, x_TH, fmt):
        return self._spoilt(super().round_trip(x_TH, fmt))

    @staticmethod
    def _spoilt(found):
        found.values.view(torch.int32)[8, 7] ^= 1 << 16  # the last bit that a bf16 result keeps
        return found


@pytest.mark.parametrize(("op", "ranks"), OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_bytes_are_counted(op, ranks, dtype):
    compared = check_small([ReferenceCodec()], ReferenceCodec(), problem(op, ranks, dtype=dtype), CPU)
    assert compared["reference"] > 19 * 1000 // 2  # half a byte per value of INT4 at least


@pytest.mark.parametrize(("op", "ranks"), OPS)
def test_one_wrong_bit_is_an_error(op, ranks):
    with pytest.raises(FcEvalError, match=r"codec reference differs in 1 of|codec reference differs in \d+ of"):
        check_small([OneBitWrong()], ReferenceCodec(), problem(op, ranks), CPU)


def test_a_wrong_codec_gets_no_row(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(codec_bench, "get_codec", lambda *_: (OneBitWrong(), ""))
    out = tmp_path / "codec.csv"
    status, _, err = run_cli(capsys, "bench", "codec", "elements=8192", "codecs=reference", f"out={out}")
    assert status == 2
    assert "differs in" in err
    assert list(tmp_path.iterdir()) == []


def test_results_of_the_timed_buffers_are_compared_whole():
    expected = result_of(ReferenceCodec(), problem(), awkward_values((8, 4096), torch.bfloat16, 0))
    found = expected.clone()
    assert same_bytes(found, expected, ReferenceCodec(), problem(), "here") == 8 * 4096 * 4
    found[-1, -1] += 1
    with pytest.raises(FcEvalError, match="here"):
        same_bytes(found, expected, ReferenceCodec(), problem(), "here")
    with pytest.raises(FcEvalError, match="gave 16 bytes"):
        same_bytes(found[0, :4], expected, ReferenceCodec(), problem(), "here")


def test_outputs_are_poisoned_and_have_the_size_of_the_result():
    for op, ranks in OPS:
        this = problem(op, ranks)
        values = awkward_values(this.values_shape, this.dtype, 0)
        result = result_of(ReferenceCodec(), this, this.source(values, ReferenceCodec()))
        out = this.poisoned_output(CPU)
        assert (out.shape, out.dtype) == (result.shape, result.dtype)
        assert (out.view(torch.uint8) == POISON).all()


def test_a_two_step_that_is_no_single_call_is_timed_as_it_runs():
    codec = CudaCodec.__new__(CudaCodec)  # what it covers needs neither a build nor a device
    for name, in_one_call in (("int4-g32", True), ("int4-g96", False), ("int2-g32-sr", False)):
        assert writes_into_buffers(codec, problem("two_step", 4, name), torch.device("cuda")) is in_one_call
        assert writes_into_buffers(codec, problem("encode", None, name), torch.device("cuda"))
    assert not writes_into_buffers(ReferenceCodec(), problem(), CPU)


def test_awkward_values_are_awkward():
    x = awkward_values((2, 20, 1000), torch.float16, 0)
    assert x.isnan().any()
    assert x.isinf().any()
    assert ((x != 0) & (x.abs() < torch.finfo(torch.float16).smallest_normal)).any()
    assert (x == 0).all(-1).any()
    assert torch.equal(x.view(torch.int16), awkward_values((2, 20, 1000), torch.float16, 0).view(torch.int16))


def test_bench_codec_writes_its_columns(capsys, tmp_path):
    out = tmp_path / "reports" / "codec.csv"
    words = ["bench", "codec", "elements=16384", "formats=int4-g32,int8-g128", "ranks=2", "threads=1", f"out={out}"]
    status, printed, err = run_cli(capsys, *words)
    assert (status, err) == (0, "")
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == codec_bench.COLUMNS
    codecs = {"reference"} | ({"cpu"} if native_status()["cpu"] is None else set())
    combinations = {(row["codec"], row["format"], row["op"]) for row in rows}
    formats, ops = ("int4-g32-asym", "int8-g128-asym"), ("encode", "decode", "qdq", "two_step_w2")
    assert combinations == {(c, f, o) for c in codecs for f in formats for o in ops}
    assert len(rows) == len(combinations)
    assert all(int(row["bytes_checked"]) > 16384 // 2 and float(row["time_us"]) > 0 for row in rows)
    assert {row["group_size"] for row in rows} == {"32", "128"}
    record = (out.parent / "codec_cpu.txt").read_text()
    assert "$ fc-eval bench codec elements=16384" in record
    assert "speed-up" in printed
    assert "speed-up" in record


MISTAKES = {
    "no such bench": (["codex"], "unknown bench 'codex': did you mean 'codec'"),
    "unknown key": (["codec", "devise=cpu"], "unknown option 'devise': did you mean 'device'"),
    "no value": (["codec", "cuda"], "'cuda' is not an option: expected KEY=VALUE"),
    "twice": (["codec", "mib=1", "mib=2"], "'mib' is given twice"),
    "text": (["codec", "mib=many"], "mib='many' is not possible: expected a whole number"),
    "both sizes": (["codec", "mib=1", "elements=4096"], "keep one of the two"),
    "half a row": (["codec", "elements=100"], "at least one row of 4096"),
    "no size": (["codec", "mib=0"], "at least one row of 4096"),
    "one rank": (["codec", "ranks=8,1"], "needs 2 ranks or more"),
    "device": (["codec", "device=gpu"], "unknown device 'gpu'"),
    "dtype": (["codec", "dtype=fp64"], "unknown dtype 'fp64'"),
    "codec": (["codec", "codecs=cpuu"], "unknown codec 'cpuu': did you mean 'cpu'"),
    "format": (["codec", "formats=itn4"], "unknown format 'itn4': did you mean 'int4'"),
    "last format": (["codec", "formats=int4-g32,mxfp8"], "unknown format 'mxfp8'"),
    "no shape": (["emulation", "shape=llama3"], "unknown model 'llama3': did you mean 'llama3_"),
    "one emulated rank": (["emulation", "tp=1"], "one rank reduces nothing"),
    "weights": (["emulation", "weights=int8"], "unknown weights 'int8': expected one of native, w8a8"),
    "threads": (["codec", "threads=0"], "threads=0 is not possible"),
    "one real rank": (["allreduce", "ranks=1"], "ranks=1 is not possible: expected 2 to 8"),
    "half a row between ranks": (["allreduce", "kib=12"], "kib=12 is not possible: expected a multiple of 8"),
    "nothing quantized": (["allreduce", "formats=int4,plain"], "plain does not quantize"),
    "virtual": (["allreduce", "virtual=yes"], "unknown virtual 'yes'"),
    "drawn and measured": (
        ["allreduce", "plot=a.csv", "kib=64", "ranks=4"],
        "plot=a.csv measures nothing: leave out ranks, kib",
    ),
    "nothing to draw": (["allreduce", "plot=none.csv"], "none.csv: No such file or directory"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence(case, capsys):
    words, sentence = MISTAKES[case]
    status, _, err = run_cli(capsys, "bench", *words)
    assert status == 2
    assert err.count("\n") == 1
    assert sentence in err


def test_bench_emulation_keeps_other_rows_and_replaces_its_own(capsys, tmp_path):
    out = tmp_path / "emulation.csv"
    small = ["tokens=16", "repeats=1", "codec=reference", "tp=2,4", f"out={out}"]
    other = dict.fromkeys(emulation.COLUMNS, "x")
    merge_csv(out, emulation.COLUMNS, emulation.KEY, [other])
    by_shape = ["shape=tiny", "layers=1"]
    for words in (["model=tiny", "comm=int4,int8-g32"], by_shape, by_shape, [*by_shape, "weights=w8a8"]):
        status, printed, err = run_cli(capsys, "bench", "emulation", *words, *small)
        assert (status, err) == (0, "")
        assert "seconds_plain" in printed
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == other
    found = {(row["model"], row["comm"], row["tp"], row["codec"], row["dtype"]) for row in rows[1:]}
    shape = "tiny shape (1 layers, random weights"
    models = [("tiny", "int4"), ("tiny", "int8-g32"), (f"{shape})", "int4"), (f"{shape}, w8a8)", "int4")]
    assert found == {(model, comm, tp, "reference", "bf16") for model, comm in models for tp in ("2", "4")}
    assert len(rows) == 1 + len(found)
    for row in rows[1:]:
        expected = float(row["seconds"]) / float(row["seconds_plain"])
        rounding = {"rel": 0.01, "abs": 5e-4}  # ratio has 3 decimals, seconds have 6
        assert float(row["ratio"]) == pytest.approx(expected, **rounding)


def test_emulation_script_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_emulation.py", "tokens=0"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "bench_emulation.py"), run_name="__main__")
    assert left.value.code == 2
    assert "tokens=0 is not possible" in capsys.readouterr().err


def test_ranks_need_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    status, _, err = run_cli(capsys, "bench", "allreduce")
    assert (status, err) == (2, "error: bench allreduce needs a CUDA device, and torch sees none here\n")


def test_help_says_how(capsys):
    assert "fc-eval bench codec [device=cuda]" in run_cli(capsys, "bench", "codec", "--help")[1]
    assert "codec " in run_cli(capsys, "bench")[1]


@dataclass(frozen=True)
class Settings:
    name: str = "a"
    sizes: tuple[int, ...] = (1, 2)
    out: Path | None = None


def test_options_are_typed():
    assert read_options(Settings, []) == Settings()
    assert read_options(Settings, ["sizes=[3,4]", "out=x", "name=b=c"]) == Settings("b=c", (3, 4), Path("x"))
    assert "sizes=1,2" in describe_options(Settings)


def test_a_table_keeps_the_rows_of_others(tmp_path):
    path, columns = tmp_path / "t.csv", ("device", "op", "us")
    first = [{"device": "a", "op": "x", "us": "1"}, {"device": "b", "op": "x", "us": "2"}]
    merge_csv(path, columns, columns[:2], first)
    merge_csv(
        path, columns, columns[:2], [{"device": "a", "op": "x", "us": "3"}, {"device": "a", "op": "y", "us": "4"}]
    )
    assert path.read_text().splitlines() == ["device,op,us", "a,x,3", "b,x,2", "a,y,4"]
    with pytest.raises(FcEvalError, match="has the columns"):
        merge_csv(path, ("device", "us"), ("device",), [])
    assert text_table(("op", "us"), first).splitlines() == ["op  us", " x   1", " x   2"]


@pytest.mark.parametrize(
    ("words", "measuring"),
    [
        (["codec", "formats=int4"], "fc_eval.bench.codec._problems"),
        (["emulation", "model=tiny"], "fc_eval.bench.emulation._model"),
        (["allreduce"], "fc_eval.bench.allreduce.in_circle"),
        (["ttft", "device=cpu", "reducer=torch", "model=tiny"], "fc_eval.bench.ttft.in_group"),
    ],
)
@pytest.mark.parametrize(
    ("content", "sentence"), [("device,colour\n", "has the columns"), (None, r"a part of this path is a file")]
)
def test_a_file_that_cannot_be_added_to_is_refused_before_anything_is_measured(
    words, measuring, content, sentence, tmp_path, monkeypatch, capsys
):
    def measure(*args):
        raise AssertionError("measured")

    monkeypatch.setattr(measuring, measure)
    out = tmp_path / "t.csv"
    out.write_text(content or "")
    status, printed, err = run_cli(capsys, "bench", *words, f"out={out if content else out / 'inside' / 't.csv'}")
    assert (status, printed) == (2, "")
    assert re.search(sentence, err)
    assert out.read_text() == (content or "")


def test_calls_take_turns():
    seen = []
    timed = [Timed([lambda i=i: seen.append(("a", i)) for i in range(2)]), Timed([lambda: seen.append(("b", 0))])]
    medians = median_times_us(timed, CPU)
    assert len(medians) == 2
    assert [name for name, _ in seen] == ["a", "b"] * (len(seen) // 2)
    assert [i for name, i in seen if name == "a"][:4] == [0, 1, 0, 1]


def test_buffers_exceed_the_caches():
    assert sets_of_buffers(64 * 2**20, CPU) == 4
    assert sets_of_buffers(2**30, CPU) == 1
    assert sets_of_buffers(1, CPU) == MOST_SETS
