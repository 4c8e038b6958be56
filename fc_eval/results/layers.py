"""Layer errors as a run keeps them: `layers_<eval>.csv`, a row per layer, mode and part of the all-reduce."""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fc_eval.errors import FcEvalError
from fc_eval.results.files import AGAIN, read

if TYPE_CHECKING:
    import pandas as pd  # takes half a second, and who writes needs none of it

_WORDS = ("site", "kind", "comm", "mode", "part")
_COUNTS = ("hidden", "elements", "nonfinite_groups")
_NUMBERS = (
    "layer",
    "signal_power",
    "mse",
    "relative_error",
    "sqnr_db",
    "cosine",
    "saturated_codes",
    "saturated_groups",
    "zero_range_groups",
)

# All elements of a kind of layer have the same share in these.
_MEANS = ("signal_power", "mse", "saturated_codes", "saturated_groups", "zero_range_groups")


@dataclass(frozen=True, eq=False)
class Layers:
    """The rows of one evaluation.

    Attributes:
        table: columns `site` (full name), `kind`, `layer` (NaN outside the stack), `hidden`, `comm` (full name), `mode`
            ('isolated', 'accumulated'), `part` ('reduce', 'gather': as sent in that stage; 'reduce_only',
            'gather_only', 'output': the layer's output), `elements`, `signal_power` and `mse` (means of squares),
            `relative_error` (norms), `sqnr_db`, `cosine`; where groups are encoded the shares `saturated_codes`,
            `saturated_groups`, `zero_range_groups`, otherwise NaN; and the count `nonfinite_groups`.
    """

    table: "pd.DataFrame"

    def summary(self) -> "pd.DataFrame":
        """By kind of layer, mode and part: errors over all elements, shares as means, and the lowest cosine."""
        import pandas as pd

        rows = []
        for key, own in self.table.groupby(["kind", "mode", "part"], sort=False):
            elements = own["elements"]
            mean = {c: float((own[c] * elements).sum(skipna=False) / elements.sum()) for c in _MEANS}
            ratio = mean["mse"] / mean["signal_power"] if mean["mse"] else 0.0
            sqnr_db = -10 * math.log10(ratio) if ratio > 0 else math.inf if ratio == 0 else math.nan
            known = {"relative_error": math.sqrt(ratio), "sqnr_db": sqnr_db, "cosine": own["cosine"].min(skipna=False)}
            rows.append(dict(zip(("kind", "mode", "part"), key, strict=True)) | mean | known)
        return pd.DataFrame(rows)

    def totals(self) -> dict[str, float]:
        """By kind of layer, mode and part ('down_proj isolated output mse'): the mean over all elements."""
        found = {}
        for key, rows in self.table.groupby(["kind", "mode", "part"], sort=False):
            error = math.fsum(rows["mse"] * rows["elements"])
            found[f"{' '.join(map(str, key))} mse"] = error / int(rows["elements"].sum())
        return found


def layers_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as CSV; numbers are written so that they read back as they are, and None as nothing."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def read_layers(folder: Path, name: str) -> Layers:
    """Reads `layers_<name>.csv`.

    Raises:
        FcEvalError: missing, cut off, or without a column.
    """
    file = folder / f"layers_{name}.csv"
    return read(file, "CSV data", lambda data: _layers(file, data))


def _layers(file: Path, data: bytes) -> Layers:
    import pandas as pd

    types = dict.fromkeys(_WORDS, "str") | dict.fromkeys(_COUNTS, "int64") | dict.fromkeys(_NUMBERS, "float64")
    # The default parser is off by one unit in the last place now and then.
    table = pd.read_csv(io.BytesIO(data), float_precision="round_trip")
    missing = next((column for column in types if column not in table), None)
    if missing is not None or table.empty:
        raise FcEvalError(f"{file} has no {missing or 'rows'}: {AGAIN}")
    return Layers(table.astype(types))
