"""What the runs of one table share, as names and values; where two tables look alike, it says in what they differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fc_eval.results.record import RunRecord

# Of a recorded configuration: what differs between the arms of one baseline, and what changes no number.
_OF_ARMS = frozenset({"comm", "policy", "policy_name", "codec", "reducer", "divergence"})
_NO_NUMBERS = frozenset({"path", "data_root", "processes", "published", "note"})
_OF_SMOOTHING = ("model.smoothing", "model.calibration.")
# Of an environment: what is no version of a package.
_MACHINE = frozenset({"device", "device_name", "platform", "threads"})

Setting = Mapping[str, str]


def setting(record: RunRecord) -> Setting:
    """Everything that decides a baseline's numbers; names that a reader knows from the command line come first.

    Model, dtype, tensor-parallel size, device, evaluations, the recorded configuration, the contents of the model's
    files, the protocol of each evaluation, and the versions of what computed.
    """
    arm, tree = record.arm, record.config.get("config")
    found = {"model": arm.model, "weights": arm.weights, "dtype": arm.dtype, "tp": str(arm.tp)}
    found |= {"device": record.device_type, "evaluations": " ".join(record.evals)}
    found |= dict(_flat(tree if isinstance(tree, Mapping) else {}))
    if arm.weights == "native":  # nothing was smoothed, whatever the settings of smoothing are
        found = {key: value for key, value in found.items() if not key.startswith(_OF_SMOOTHING)}
    found["contents of the model's files"] = plain(record.config.get("model_files"))
    for name, info in record.evals.items():
        found |= {f"{name} samples": str(info.samples), f"{name} text": info.label}
        found |= {f"{name} {key}": plain(value) for key, value in sorted(record.protocol.get(name, {}).items())}
    return found | {key: plain(value) for key, value in sorted(record.env.items()) if key not in _MACHINE}


def differences(settings: Sequence[Setting]) -> list[str]:
    """For each setting, what tells it from the others ('eval.text.limit=8'), with as few names as are needed."""
    names = list(dict.fromkeys(name for each in settings for name in each))
    values = [tuple(each.get(name, "none") for name in names) for each in settings]
    kept: list[int] = []
    for column in range(len(names)):
        if _told(values, [*kept, column]) > _told(values, kept):
            kept.append(column)
    return [", ".join(f"{names[column]}={_short(row[column])}" for column in kept) for row in values]


def _told(values: Sequence[tuple[str, ...]], columns: Sequence[int]) -> int:
    """How many rows these columns tell apart."""
    return len({tuple(row[column] for column in columns) for row in values})


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values of a recorded configuration; evaluations by their names."""
    for key, value in sorted(tree.items()):
        if key in _OF_ARMS or key in _NO_NUMBERS:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif key == "specs" and isinstance(value, list):
            specs = [spec for spec in value if isinstance(spec, Mapping)]
            yield from _flat({str(spec.get("name")): spec for spec in specs}, above)
        else:
            yield f"{above}{key}", plain(value)


def plain(value: Any) -> str:
    """A value as YAML would write it, for tables and titles."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:12]}..."
