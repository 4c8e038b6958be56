"""The page of measured all-reduces: who is ahead from which size on, and what a CSV file may lack."""

import csv
from pathlib import Path

import pytest
from test_cli import run_cli

from fc_eval.bench.allreduce_page import page_of, times_table
from fc_eval.bench.allreduce_rows import ADDED, COLUMNS, KEY, ahead_from, best_ratios, read_places, size_text
from fc_eval.bench.table import merge_csv
from fc_eval.errors import FcEvalError

ROOT = Path(__file__).parents[1]
SIZES = (64 << 10, 1 << 20, 16 << 20)
NCCL_US = (10.0, 20.0, 100.0)
INT4, INT8 = "int4-g128-asym", "int8-g128-asym"


def lines(
    implementation,
    times_us,
    algorithm="",
    formats="",
    blocks="",
    link="peer",
    nccl_us=NCCL_US,
    fraction="0.5",
    noise="",
):
    """Rows of one comm over `SIZES`, as many as there are times; no ratio where NCCL was not measured."""
    rows = []
    for i, time_us in enumerate(times_us):
        said = {"device": "Some GPU", "link": link, "world_size": "2", "implementation": implementation}
        said |= {"algorithm": algorithm, "format": formats, "size_bytes": str(SIZES[i]), "blocks": blocks}
        said |= {"time_us": f"{time_us:.2f}", "wire_bytes": str(SIZES[i] // 4), "link_fraction": fraction}
        said |= {"ratio_to_nccl": f"{nccl_us[i] / time_us:.2f}" if nccl_us else "", "sqnr_db": noise}
        rows.append([said.get(column, "") for column in COLUMNS])
    return rows


def fused(times_us, algorithm, formats, blocks="0", **changes):
    return lines("fused", times_us, algorithm, formats, blocks, noise="20.0", **changes)


PEER = [
    *lines("nccl", NCCL_US),
    *lines("symm_mem_two_shot", (5, 20, 90)),
    *fused((20, 10, 50), "two_step", INT4),
    *fused((8, 16, 95), "two_step", INT8),
    *fused((10, 20, 50), "one_step", INT4),
    *fused((40, 40, 200), "one_step", INT8),
]
BLOCKS = [*fused((21, 12), "two_step", INT4, "16"), *fused((19, 11), "two_step", INT4, "32")]
STAGED = [
    *lines("nccl", NCCL_US, link="staged"),
    *lines("symm_mem_two_shot", (1, 2, 9), link="staged", fraction="4.5"),
    *fused((20, 10, 50), "two_step", INT4, link="staged"),
]
ONE_SIZE = [row for row in PEER if str(SIZES[1]) in row]
VIRTUAL = [
    row
    for blocks, us in (("16", 30), ("32", 20))
    for row in fused((us,), "two_step", INT4, blocks, link="peer, virtual ranks", nccl_us=None, fraction="")
]


def write(path, rows, columns=COLUMNS):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def cells(text, label):
    """The cells after its label of the first row that begins with it."""
    return next(line for line in text.splitlines() if line.startswith(f"| {label} |")).strip("| ").split(" | ")[1:]


def ahead(text):
    """By comm, from where on it is ahead of NCCL and of the best that does not quantize."""
    table = text.split("**From which size on it is ahead**")[1].strip().split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {label: tuple(found) for label, _, _, *found in rows}


def test_ahead_from_the_smallest_size_on_and_to_the_end(tmp_path):
    text, plots = page_of(write(tmp_path / "a.csv", PEER + BLOCKS))
    assert ahead(text) == {
        "two-step INT4 g128": ("from 1 MiB", "from 1 MiB"),
        "two-step INT8 g128": ("from 64 KiB", "only at 1 MiB"),
        "one-step INT4 g128": ("from 16 MiB", "from 16 MiB"),  # as fast as NCCL is not ahead of it
        "one-step INT8 g128": ("never", "never"),
    }
    assert cells(text, "two-step INT4 g128") == ["20.0 (0.50x)", "10.0 (2.00x)", "50.0 (2.00x)"]  # the default blocks
    assert cells(text, "NCCL") == ["10.0", "20.0", "100"]
    assert [plot.name.split("_")[1] for plot in plots] == ["ratio", "link", "blocks", "noise"]
    texts = ("default", "16", "32", "64 KiB", "1 MiB", "16 MiB")
    drawn = [text for text in texts if f">{text}</text>" in plots[2].svg]
    assert drawn == ["default", "16", "32", "64 KiB", "1 MiB"]  # one number of blocks at 16 MiB
    (place,) = read_places(tmp_path / "a.csv")
    assert best_ratios(place.lines()) == {SIZES[0]: 2.0, SIZES[1]: 1.0, SIZES[2]: 1.11}


def test_only_sizes_of_both_are_compared():
    assert ahead_from({1: 2.0, 2: 0.5, 4: 2.0, 8: 2.0}, {1: 1.0, 2: 1.0, 4: 1.0}) == 4
    assert ahead_from({1: 2.0}, {1: 1.0}) == 1
    assert ahead_from({1: 2.0, 2: 1.0}, {1: 1.0, 2: 1.0}) is None
    assert ahead_from({1: 2.0}, {2: 1.0}) is None
    assert [size_text(size) for size in (512, 3 << 19, 1 << 30)] == ["512 B", "1.5 MiB", "1 GiB"]


def test_what_goes_past_the_link_is_shown_and_not_compared(tmp_path):
    text, plots = page_of(write(tmp_path / "a.csv", STAGED))
    assert ahead(text)["two-step INT4 g128"] == ("from 1 MiB", "from 1 MiB")
    assert cells(text, "PyTorch symmetric memory, two-shot") == ["1.0 (10.00x)", "2.0 (10.00x)", "9.0 (11.11x)"]
    assert "two-shot: writes into the other GPUs' memory, past this link" in text
    assert not any("symmetric" in plot.svg for plot in plots)


def test_without_nccl_and_with_one_size(tmp_path):
    text, plots = page_of(write(tmp_path / "a.csv", VIRTUAL))
    assert "NCCL was not measured here, so nothing is compared" in text
    assert ahead(text) == {f"two-step INT4 g128, {count} blocks": ("not compared",) * 2 for count in (16, 32)}
    assert cells(text, "two-step INT4 g128, 32 blocks") == ["20.0"]
    assert "**Share of the link" not in text
    assert [plot.name for plot in plots] == ["a_blocks_Some_GPU_peer_virtual_ranks_w2", "a_noise_w2"]


def test_links_have_sections_of_their_own(tmp_path):
    places = read_places(write(tmp_path / "a.csv", PEER + STAGED + VIRTUAL))
    assert [place.title for place in places] == [
        f"Some GPU, {link}, W = 2" for link in ("peer", "staged", "peer, virtual ranks")
    ]
    table = times_table("here", [("ours", places[2].lines()[0])], SIZES)
    assert table.texts() == [["ours", "30.0", "", ""]]


def test_dtypes_have_sections_of_their_own_and_files_without_them_read(tmp_path):
    old = write(tmp_path / "a.csv", [row[:-1] for row in ONE_SIZE], COLUMNS[:-1])
    (place,) = read_places(old)
    assert (COLUMNS[-1], place.dtype, place.title) == ("dtype", "", "Some GPU, peer, W = 2")
    measured = [dict(zip(COLUMNS, [*row[:-1], dtype], strict=True)) for dtype in ("bf16", "fp32") for row in ONE_SIZE]
    merge_csv(old, COLUMNS, KEY, measured, ADDED)
    titles = [place.title for place in read_places(old)]
    assert titles == ["Some GPU, peer, W = 2", "Some GPU, peer, W = 2, bf16", "Some GPU, peer, W = 2, fp32"]
    assert [len(place.rows) for place in read_places(old)] == [len(ONE_SIZE)] * 3
    text, plots = page_of(old)
    assert "## Some GPU, peer, W = 2, fp32" in text
    names = [plot.name for plot in plots]
    assert names == ["a_noise_w2", "a_noise_w2_bf16", "a_noise_w2_fp32"]


WRONG = {
    "unknown column": ([*COLUMNS, "colour"], PEER, r"columns of `fc-eval bench allreduce` \(unknown colour\): give a"),
    "missing column": (
        ["x" if name == "bytes_checked" else name for name in COLUMNS],
        PEER,
        r"\(unknown x; missing bytes_checked\)",
    ),
    "no row": (COLUMNS, [], "has no row: measure some with `fc-eval bench allreduce out="),
    "format": (COLUMNS, [*PEER, *fused((1,), "two_step", "itn4")], "line 20: unknown format 'itn4'"),
    "time": (COLUMNS, lines("nccl", (-1,)), "line 2: W is below 2, or a size or time is not above 0"),
    "size": (
        COLUMNS,
        [[v if v != "1048576" else str(10**30) for v in r] for r in ONE_SIZE],
        "line 2: a size is 2.63 by",
    ),
    "share": (COLUMNS, lines("nccl", (1,), fraction="nan"), "line 2: link_fraction=nan is not possible"),
    "ratio": (COLUMNS, lines("nccl", (1,), nccl_us=(float("inf"),)), "line 2: ratio_to_nccl=inf is not possible"),
    "blocks": (
        COLUMNS,
        fused((1,), "two_step", INT4, "-1"),
        "line 2: a size is 2.63 bytes or more, or blocks is below",
    ),
    "half a row": (COLUMNS, [["Some GPU", "peer", "2"]], "line 2: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_no_such_table_is_one_sentence(case, tmp_path):
    columns, rows, sentence = WRONG[case]
    with pytest.raises(FcEvalError, match=sentence) as raised:
        page_of(write(tmp_path / "a.csv", rows, columns))
    assert "\n" not in str(raised.value)


def test_the_command_draws_beside_the_file_without_a_gpu(tmp_path, capsys):
    path = write(tmp_path / "mine.csv", ONE_SIZE)
    status, printed, err = run_cli(capsys, "bench", "allreduce", f"plot={path}")
    assert ahead((tmp_path / "mine.md").read_text())["two-step INT4 g128"] == ("from 1 MiB", "from 1 MiB")
    assert (status, printed, err) == (0, f"written: {tmp_path / 'mine.md'}\n", "")
    assert "(plots/mine_noise_w2.png)" in (tmp_path / "mine.md").read_text()
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == ["mine_noise_w2.png", "mine_noise_w2.svg"]


def test_the_page_of_two_h200_is_what_its_csv_says():
    folder = ROOT / "reports" / "fused"
    text, plots = page_of(folder / "allreduce.csv")
    assert (folder / "allreduce.md").read_text() == text
    kept = {f"{plot.name}.{ending}" for plot in plots for ending in ("png", "svg")}
    assert {file.name for file in (folder / "plots").iterdir()} == kept
