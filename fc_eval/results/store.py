"""Run folders on disk: written atomically, locked while they run, never half there.

    RUNS/<name>-<fingerprint>/   config.yaml  status.json  log.txt  result.json
                                 evals/<eval>.json  windows_<eval>.npz  samples_<task>.jsonl  layers_<eval>.csv
    RUNS/.locks/<fingerprint>.lock

An evaluation's files appear as soon as it is done, so a run that dies in the third of four keeps the first two.
"""

import errno
import io
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from filelock import FileLock, Timeout

from fc_eval.errors import FcEvalError, os_error, os_reason
from fc_eval.results.files import AGAIN, read_json, read_yaml, write_atomic, write_json
from fc_eval.results.layers import layers_csv

SCHEMA = 1
# A supervisor writes a heartbeat this often; a folder left `running` whose heartbeat is older by far has no one.
HEARTBEAT_S = 15.0


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
        """`status.json`.

        Raises:
            FcEvalError: it is missing or cannot be read, as for every other file here.
        """
        return read_json(self.path / "status.json")

    def set_status(self, state: str, **extra: Any) -> None:
        """Updates `status.json`: state running, done or failed; other fields are kept unless given."""
        now, kept = time.time(), {}
        if state != "running" or extra.pop("keep", False):
            with suppress(FcEvalError):  # nothing is kept of a status that does not read
                kept = self.status()
        fresh = {"schema": SCHEMA, "state": state, "fingerprint": self.fingerprint, "name": self.path.name}
        fresh |= {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": now}
        if state == "running":
            fresh |= {"started": kept.get("started", now), "ended": None, "error": None}
        else:
            fresh |= {"started": kept.get("started", now), "ended": now}
        write_json(self.path / "status.json", kept | fresh | extra)

    def write_config(self, mapping: dict[str, Any]) -> None:
        """Keeps the resolved configuration as `config.yaml`, the fingerprint last: a file that was cut has none."""
        whole = {key: value for key, value in mapping.items() if key != "fingerprint"}
        whole["fingerprint"] = self.fingerprint
        write_atomic(self.path / "config.yaml", yaml.safe_dump(whole, sort_keys=False).encode())

    def read_config(self) -> dict[str, Any]:
        """The resolved configuration under `config`, and beside it what the run is made of.

        Raises:
            FcEvalError: it is missing, cannot be read, or was cut off.
        """
        file = self.path / "config.yaml"
        tree = read_yaml(file)
        for key, kind in (("config", dict), ("fingerprint", str)):
            if not isinstance(tree.get(key), kind):
                raise FcEvalError(f"{file} is cut off, it has no {key!r}: {AGAIN}")
        return tree

    def write_result(self, result: dict[str, Any]) -> None:
        """Keeps `result.json`, the record of the whole run."""
        write_json(self.path / "result.json", result)

    def read_result(self) -> dict[str, Any]:
        """`result.json`."""
        return read_json(self.path / "result.json")

    def save_eval(
        self,
        name: str,
        summary: dict[str, Any],
        arrays: dict[str, npt.NDArray[Any]] | None,
        rows: Iterable[dict[str, Any]] | None,
        layers: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        """Keeps one finished evaluation: arrays, rows or layers first, its summary last, which marks it as complete."""
        if arrays is not None:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, allow_pickle=False, **arrays)
            write_atomic(self.path / f"windows_{name}.npz", buffer.getvalue())
        if rows is not None:
            lines = "".join(json.dumps(row, sort_keys=True, default=float) + "\n" for row in rows)
            write_atomic(self.path / f"samples_{name}.jsonl", lines.encode())
        if layers is not None:
            write_atomic(self.path / f"layers_{name}.csv", layers_csv(layers))
        write_json(self.path / "evals" / f"{name}.json", summary)

    def discard_results(self) -> None:
        """Removes every number of the run; its configuration, status and log stay."""
        shutil.rmtree(self.path / "evals", ignore_errors=True)
        for pattern in ("result.json", "windows_*.npz", "samples_*.jsonl", "layers_*.csv"):
            for file in self.path.glob(pattern):
                file.unlink()


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
            raise self._unwritable(error) from None

    def check(self) -> None:
        """Makes sure, without changing anything, that `prepare` could make the folder.

        Raises:
            FcEvalError: it could not be written to.
        """
        place = next(place for place in (self.root, *self.root.absolute().parents) if os.path.lexists(place))
        code = errno.ENOTDIR if not place.is_dir() else 0 if os.access(place, os.W_OK | os.X_OK) else errno.EACCES
        if code:
            raise self._unwritable(OSError(code, os.strerror(code), str(place)))

    def _unwritable(self, error: OSError) -> FcEvalError:
        return FcEvalError(
            f"out={self.root} is not writable: {os_reason(error, self.root)}: choose another folder with out=DIR"
        )

    def folder(self, name: str, fingerprint: str) -> RunFolder:
        """The folder of a run, found by fingerprint if it exists under whatever name."""
        existing = sorted(self.root.glob(f"*-{fingerprint[:10]}"))
        return RunFolder(existing[0] if existing else self.root / f"{name}-{fingerprint[:10]}", fingerprint)

    @contextmanager
    def lock(self, fingerprint: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Holds the run's lock, which the system frees when its holder dies; a second process waits here.

        Args:
            fingerprint: of the run.
            waiting: called each second while another process holds the lock; what it raises ends the waiting.

        Raises:
            FcEvalError: the lock file cannot be made.
        """
        lock = FileLock(self.root / ".locks" / f"{fingerprint[:10]}.lock")
        try:
            while not lock.is_locked:
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    waiting()
                    with suppress(Timeout):
                        lock.acquire(timeout=1)
        except OSError as error:
            raise os_error(error, lock.lock_file) from None
        try:
            yield
        finally:
            lock.release()
