"""CSV files of measurements, which people merge and edit: read whole, or refused with the line that is wrong."""

import csv
from collections.abc import Callable, Collection
from pathlib import Path

from fc_eval.errors import FcEvalError, os_error

Said = dict[str, str]
MEND = "mend the row or measure again"


def read_measured(path: Path, check_columns: Callable[[list[str]], None]) -> list[tuple[int, Said]]:
    """The rows of a file, each with the number of its line.

    Args:
        path: the file.
        check_columns: takes the names of the columns before any row is read, and raises where it wants others.

    Raises:
        FcEvalError: no such file, no CSV text in UTF-8, a row with fewer or more values than columns, or what
            `check_columns` says.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ())
            check_columns(names)
            found = []
            for said in reader:
                count = sum(value is not None for key, value in said.items() if key is not None)
                count += len(said.get(None, ()))
                if count != len(names):
                    raise FcEvalError(
                        f"{path}, line {reader.line_num}: {count} values where {len(names)} are expected: {MEND}"
                    )
                found.append((reader.line_num, said))
            return found
    except OSError as error:
        raise os_error(error, path) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise FcEvalError(f"{path} is no CSV file ({error}): give one that fc-eval wrote") from None


def expect_columns(path: Path, wanted: Collection[str], bench: str) -> Callable[[list[str]], None]:
    """A check for `read_measured` that none of `wanted` is missing; `bench` is what writes such files."""

    def check(names: list[str]) -> None:
        missing = [name for name in wanted if name not in names]
        if missing:
            raise FcEvalError(f"{path} lacks the columns {', '.join(missing)}: expected those of {bench}")

    return check
