"""CSV files of measurements that people have edited: every reader of them says the file and the line that is wrong."""

import pytest

from fc_eval.bench.allreduce_rows import read_places
from fc_eval.bench.table import merge_csv
from fc_eval.errors import FcEvalError
from fc_eval.predict.calls import read_calls
from fc_eval.predict.rows import read_rows
from fc_eval.results.measured_csv import expect_columns, read_measured

COLUMNS = ("device", "time")
READERS = {
    "any": lambda path: read_measured(path, expect_columns(path, COLUMNS, "a bench")),
    "all-reduces, to predict": read_calls,
    "all-reduces, to draw": read_places,
    "prefills": read_rows,
    "a table that is added to": lambda path: merge_csv(path, COLUMNS, COLUMNS[:1], []),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("data", [b"device,time\xff\n", b"device,time\n" + b"x" * 200_000 + b",1\n"])
def test_what_is_no_csv_text_is_one_sentence(reader, data, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    with pytest.raises(FcEvalError, match=r"t\.csv (is no CSV file|lacks the columns|does not have|has the columns)"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", ["any", "a table that is added to"])
@pytest.mark.parametrize(("row", "count"), [("a", 1), ("a,1,2", 3), ("a,1,2,3", 4)])
def test_a_row_of_another_length_names_its_line(reader, row, count, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"device,time\nb,2\n{row}\n")
    with pytest.raises(FcEvalError, match=rf"t\.csv, line 3: {count} values where 2 are expected: mend the row"):
        READERS[reader](path)
    assert path.read_text() == f"device,time\nb,2\n{row}\n"


def test_rows_come_with_their_lines(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('device,time\n"a\nb",1\n\nc,\n')  # a value of two lines, an empty line, an empty value
    assert READERS["any"](path) == [(3, {"device": "a\nb", "time": "1"}), (5, {"device": "c", "time": ""})]
