"""Run folders on disk: written atomically, locked while they run, never half there.

    RUNS/<name>-<fingerprint>/   config.yaml  status.json  log.txt  result.json
                                 evals/<eval>.json  windows_<eval>.npz  samples_<task>.jsonl
    RUNS/.locks/<fingerprint>.lock

An evaluation's files appear as soon as it is done, so a run that dies in the third of four keeps the first two.
"""

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from filelock import FileLock

from fc_eval.errors import FcEvalError

SCHEMA = 1
# A supervisor writes a heartbeat this often; a folder left `running` whose heartbeat is older by far has no one.
HEARTBEAT_S = 15.0


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file that is either complete or not there, whatever happens in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically, in a stable form; NaN and Inf are refused because JSON has none."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        FcEvalError: the file is not complete JSON.
    """
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FcEvalError(f"{path} is not complete JSON ({error}): delete the folder and run again") from None


@dataclass(frozen=True)
class RunFolder:
    """One run's files. `fingerprint` identifies what was run; `path` need not exist yet."""

    path: Path
    fingerprint: str

    @property
    def log_path(self) -> Path:
        """Everything that the run printed."""
        return self.path / "log.txt"

    def status(self) -> dict[str, Any]:
        """`status.json`, or a state of 'absent' where there is none."""
        file = self.path / "status.json"
        return dict(read_json(file)) if file.exists() else {"state": "absent"}

    def set_status(self, state: str, **extra: Any) -> None:
        """Updates `status.json`: state running, done or failed; other fields are kept unless given."""
        now = time.time()
        kept = self.status() if state != "running" or extra.pop("keep", False) else {}
        fresh = {"schema": SCHEMA, "state": state, "fingerprint": self.fingerprint, "name": self.path.name}
        fresh |= {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": now}
        if state == "running":
            fresh |= {"started": kept.get("started", now), "ended": None, "error": None}
        else:
            fresh |= {"started": kept.get("started", now), "ended": now}
        write_json(self.path / "status.json", kept | fresh | extra)

    def is_done(self) -> bool:
        """Whether the run ended well and its result is there."""
        return (self.path / "result.json").exists() and self.status().get("state") == "done"

    def write_config(self, mapping: dict[str, Any]) -> None:
        """Keeps the resolved configuration as `config.yaml`."""
        write_atomic(self.path / "config.yaml", yaml.safe_dump(mapping, sort_keys=True).encode())

    def read_config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return dict(yaml.safe_load((self.path / "config.yaml").read_text()))

    def write_result(self, result: dict[str, Any]) -> None:
        """Keeps `result.json`, the record of the whole run."""
        write_json(self.path / "result.json", result)

    def read_result(self) -> dict[str, Any]:
        """`result.json`."""
        return dict(read_json(self.path / "result.json"))

    def save_eval(
        self,
        name: str,
        summary: dict[str, Any],
        arrays: dict[str, npt.NDArray[Any]] | None,
        rows: Iterable[dict[str, Any]] | None,
    ) -> None:
        """Keeps one finished evaluation: its arrays or rows first, its summary last, which marks it as complete."""
        if arrays is not None:
            with tempfile.SpooledTemporaryFile(max_size=1 << 26) as buffer:
                np.savez_compressed(buffer, allow_pickle=False, **arrays)
                buffer.seek(0)
                write_atomic(self.path / f"windows_{name}.npz", buffer.read())
        if rows is not None:
            lines = "".join(json.dumps(row, sort_keys=True, default=float) + "\n" for row in rows)
            write_atomic(self.path / f"samples_{name}.jsonl", lines.encode())
        write_json(self.path / "evals" / f"{name}.json", summary)

    def discard_results(self) -> None:
        """Removes every number of the run; its configuration, status and log stay."""
        shutil.rmtree(self.path / "evals", ignore_errors=True)
        for pattern in ("result.json", "windows_*.npz", "samples_*.jsonl"):
            for file in self.path.glob(pattern):
                file.unlink()

    def load_eval(self, name: str) -> dict[str, Any] | None:
        """The summary of an evaluation that is complete, None otherwise."""
        file = self.path / "evals" / f"{name}.json"
        return dict(read_json(file)) if file.exists() else None


@dataclass(frozen=True)
class RunStore:
    """All run folders below `root`."""

    root: Path

    def prepare(self) -> None:
        """Makes the folder.

        Raises:
            FcEvalError: it cannot be written to.
        """
        try:
            (self.root / ".locks").mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise FcEvalError(
                f"out={self.root} is not writable ({error.strerror or error}): choose another folder with out=DIR"
            ) from None

    def folder(self, name: str, fingerprint: str) -> RunFolder:
        """The folder of a run, found by fingerprint if it exists under whatever name."""
        existing = sorted(self.root.glob(f"*-{fingerprint[:10]}"))
        return RunFolder(existing[0] if existing else self.root / f"{name}-{fingerprint[:10]}", fingerprint)

    def folders(self) -> list[RunFolder]:
        """Every run folder, in the order of names."""
        found = []
        for status in sorted(self.root.glob("*/status.json")):
            fingerprint = str(read_json(status).get("fingerprint", ""))
            found.append(RunFolder(status.parent, fingerprint))
        return found

    @contextmanager
    def lock(self, fingerprint: str) -> Iterator[None]:
        """Holds the run's lock; a second process waits here. The system frees it when its holder dies."""
        with FileLock(self.root / ".locks" / f"{fingerprint[:10]}.lock"):
            yield
