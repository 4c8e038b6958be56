"""Reports from constructed runs: golden Markdown, a page that needs nothing else, and nothing that disappears."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from run_fixtures import Run, Task, quantized, small_set, write_run, write_status

from fc_eval.errors import FcEvalError
from fc_eval.report.build import build_report
from fc_eval.report.details import detail_tables
from fc_eval.report.groups import group_pairs
from fc_eval.report.markdown import first_table_markdown
from fc_eval.report.tables import summary_table
from fc_eval.report.terminal import terminal_table
from fc_eval.results.compare import pair_runs
from fc_eval.results.record import load_run, load_runs
from fc_eval.results.table import FIVE_TASKS

GOLDEN = Path(__file__).parent / "golden_report.md"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    small_set(folder / "runs")
    return folder / "runs", build_report(folder / "runs", folder / "out")


def groups_of(tmp_path, *runs):
    return group_pairs(pair_runs([load_run(write_run(tmp_path, run)) for run in runs]))


class Page(HTMLParser):
    """Collects tags with their attributes, and checks that they are closed in order."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "use", "path"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_golden_markdown(small):
    _, report = small
    assert report.markdown.read_text() == GOLDEN.read_text(), "compare with tests/golden_report.md"


def test_all_files_are_there(small):
    _, report = small
    assert report.runs == 3
    assert report.problems == ()
    names = {path.name for path in report.html.parent.rglob("*") if path.is_file()}
    assert {"report.html", "report.md", "results.csv"} <= names
    assert {path.suffix for path in report.plots} == {".png", ".svg"}
    assert all(path.stat().st_size > 1000 for path in report.plots)
    for name in re.findall(r"\(plots/([^)]+)\)", report.markdown.read_text()):
        assert name in names
    assert str(report.html) in report.summary


def test_the_same_runs_give_the_same_bytes(small, tmp_path):
    runs, report = small
    again = build_report([runs], tmp_path / "again")
    first, second = report.html.parent, again.html.parent
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_page_needs_nothing_beside_it(small):
    _, report = small
    text = report.html.read_text()
    assert "://" not in text
    assert "@import" not in text
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "image", "object"}
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        for key in ("href", "xlink:href"):
            assert attributes.get(key, "#").startswith("#"), (tag, attributes)
    assert "prefers-color-scheme: dark" in text


def test_ids_in_the_page_are_unique_and_referenced_ones_exist(small):
    _, report = small
    page = Page(report.html.read_text())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {a[key][1:] for _, a in page.tags for key in ("href", "xlink:href") if key in a}
    used |= set(re.findall(r"url\(#([^)]+)\)", report.html.read_text()))
    assert used
    assert used <= set(ids)


def test_baseline_first_and_every_number_with_bits_and_error(small):
    runs, _ = small
    (group,) = group_pairs(pair_runs(load_runs(runs)[0]))
    table = summary_table(group)
    assert [row[0].text for row in table.rows] == ["baseline (fp32 ordered)", "INT8 g128", "INT4 g128"]
    assert table.pinned == 1
    assert [row[1].text for row in table.rows] == ["16.00", "8.25", "4.25"]
    errors = [i for i, column in enumerate(table.columns) if column.title == "Δ ± error"]
    assert len(errors) == 2
    for row in table.rows:
        assert all("±" in row[i].text for i in errors)
    assert all("(partial)" in table.columns[i].over for i in errors)


def test_csv_holds_every_number(small):
    _, report = small
    table = pd.read_csv(report.csv)
    assert len(table) == 9
    assert table.delta_stderr.notna().all()
    assert table.group_size.dropna().eq(128).all()


def test_problems_and_warnings_are_shown_and_escaped(tmp_path):
    base = Run(published={"wikitext2": 5.47}, partial=False, notes=("weights dequantized from Q4_1 <b>",))
    write_run(tmp_path / "runs", base)
    write_run(tmp_path / "runs", quantized(base, "int2", 2.25, 1.5, nonfinite=7))
    write_run(tmp_path / "runs", quantized(Run(windows=12), "int4", 4.25, 0.02))
    write_status(tmp_path / "runs", "lost-run", state="failed", error="exit status 1:\nOutOfMemoryError: | <script>")
    write_status(tmp_path / "runs", "still-run", state="running")
    broken = write_run(tmp_path / "runs", Run(tp=8), name="cut-off-run")
    (broken / "result.json").write_text('{"schema": 1')
    report = build_report(tmp_path / "runs", tmp_path / "out")
    assert [(problem.name, problem.state) for problem in report.problems] == [
        ("cut-off-run", "broken"),
        ("lost-run", "failed"),
        ("still-run", "dead"),
    ]
    html, markdown = report.html.read_text(), report.markdown.read_text()
    for text in (Page(html).text, markdown, report.summary):
        for words in ("OutOfMemoryError", "not complete JSON", "ended without a word", "7 in gather", "is not among"):
            assert words in text
        assert "not within 0.02 of the published 5.47" in text
    assert "<script>" not in html.replace("<script>\n", "", 1)
    assert "\\| &lt;script>" in markdown
    assert "weights dequantized from Q4_1 <b>" in Page(html).text
    assert "no baseline" in markdown


def test_notes_are_said_only_where_they_hold(small):
    _, report = small
    assert "Q4_1" not in report.markdown.read_text()
    assert "(subset)" not in report.markdown.read_text()


def test_partial_evaluations_can_be_left_out(tmp_path):
    base = Run(partial=False)
    write_run(tmp_path / "runs", base)
    write_run(tmp_path / "runs", replace(quantized(base, "int4", 4.25, 0.02), partial=False))
    write_run(tmp_path / "runs", Run(windows=4), name="short-run")
    report = build_report(tmp_path / "runs", tmp_path / "out", include_partial=False)
    assert report.runs == 2
    assert [(problem.name, problem.state) for problem in report.problems] == [("short-run", "left out")]
    assert "(partial)" not in report.markdown.read_text()
    with_all = build_report(tmp_path / "runs", tmp_path / "out2")
    assert with_all.runs == 3
    assert "wikitext2 (partial)" in with_all.markdown.read_text()


def test_divergence_and_subset_columns(tmp_path):
    base = Run(texts=("wikitext2", "c4"))
    groups = groups_of(tmp_path, base, quantized(base, "int4", 4.25, 0.02, divergence=True))
    titles = [column.flat for column in summary_table(groups[0]).columns]
    assert "c4 (subset) (partial) perplexity" in titles
    assert "wikitext2 vs baseline KL, nats" in titles
    assert "wikitext2 vs baseline same top-1, %" in titles
    assert not any("KL" in column.flat for column in summary_table(groups[0], divergence=False).columns)
    details = dict(detail_tables(groups[0]))
    table = details["wikitext2: divergence from the baseline, 16 windows (partial)"]
    assert [row[0].text for row in table.rows] == ["INT4 g128"]
    assert table.texts()[0][2:] == ["0.01000 ± 0.00026", "0.0300", "0.400", "98.000 ± 0.052"]
    build_report(tmp_path, tmp_path / "out")
    assert "compared with no published number" in (tmp_path / "out" / "report.md").read_text()


def test_accuracy_says_what_it_is(tmp_path):
    def header(names):
        base = Run(tasks={name: Task(has_norm=name != "winogrande") for name in names}, texts=())
        group = groups_of(tmp_path / "-".join(names), base, quantized(base, "int4", 4.25, 0.0, texts=()))[0]
        return [column.flat for column in summary_table(group).columns][3:]

    assert header(["piqa"]) == ["piqa (partial) acc_norm, %", "piqa (partial) Δ ± error"]
    assert header(["winogrande"])[0] == "winogrande (partial) acc, %"
    assert header(["piqa", "winogrande"])[0] == "mean of 2 tasks (partial) acc, %"
    assert header(list(FIVE_TASKS))[0] == "five-task average (partial) acc, %"


def test_runs_of_one_label_are_told_apart(tmp_path):
    base = Run()
    int4 = quantized(base, "int4", 4.25, 0.02)
    group = groups_of(tmp_path, base, int4, replace(int4, codec="cpu"), replace(int4, codec="cpu", shift=0.03))[0]
    assert len(set(group.labels)) == 4
    assert "INT4 g128, codec reference" in group.labels
    assert sum("codec cpu [" in label for label in group.labels) == 2


def test_runs_of_different_settings_stand_in_different_tables(tmp_path):
    bases = [Run(), Run(tp=2), Run(dtype="fp16"), Run(windows=8)]
    arms = [quantized(base, "int4", 4.25, 0.02) for base in bases]
    groups = groups_of(tmp_path, *bases, *arms)
    assert len(groups) == 4
    assert all(len(group.pairs) == 2 and group.first.is_baseline for group in groups)
    assert len({group.slug for group in groups}) == 4


def test_terminal_table(small):
    runs, _ = small
    lines = terminal_table(load_runs(runs)[0]).splitlines()
    assert max(len(line) for line in lines) <= 120
    assert "wikitext2: 16 windows (partial)" in lines[0]
    rows = {line.split("  ")[0]: line for line in lines[4:]}
    for part in ("4.25", "3.76x", "20.026", "+0.397  ± 0.022", "56.50", "−3.50 ± 1.64"):
        assert part in rows["INT4 g128"]


def test_terminal_table_says_why_there_is_no_delta(tmp_path):
    record = load_run(write_run(tmp_path, quantized(Run(), "int4", 4.25, 0.02)))
    text = terminal_table([record])
    assert "no baseline" in text
    assert "is not among these runs" in text


def test_first_table_for_a_readme(small):
    runs, _ = small
    text = first_table_markdown(load_runs(runs)[0])
    assert text.splitlines()[2].startswith("| baseline (fp32 ordered) | 16.00 | 1.00x | 19.630 |")
    assert all(line in GOLDEN.read_text() for line in text.splitlines()[:5])
    assert "16 windows (partial)" in text


def test_mistakes_are_said_in_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FcEvalError, match=r"no run in .*empty"):
        build_report(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(FcEvalError, match="is not a folder"):
        build_report(tmp_path / "nowhere", tmp_path / "out")
    write_status(tmp_path / "failed", "lost-run", state="failed", error="killed by SIGKILL")
    with pytest.raises(FcEvalError, match=r"no finished run in .*lost-run, failed .*killed by SIGKILL"):
        build_report(tmp_path / "failed", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_run(tmp_path / "runs", Run())
    (tmp_path / "file").write_text("")
    with pytest.raises(FcEvalError, match="cannot be written to"):
        build_report(tmp_path / "runs", tmp_path / "file")
