"""Starts a module in several processes with `fc_eval.launch`, from a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CALL = "import sys; from fc_eval.launch import launch; sys.exit(launch(int(sys.argv[1]), *sys.argv[2:]))"


def start(count: int, module: str, *arguments: str) -> "subprocess.Popen[str]":
    """The launcher, running; the module is found in tests/ or in the current folder."""
    return subprocess.Popen(
        [sys.executable, "-c", _CALL, str(count), module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
    )


def launched(count: int, module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The same, once it has ended."""
    process = start(count, module, *arguments)
    said, _ = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, said)


def main() -> None:
    """A worker that makes a mistake, or notes its process id in a folder and waits."""
    from fc_eval.errors import FcEvalError
    from fc_eval.launch import USER_ERROR_EXIT, die_with_parent, report_error

    die_with_parent()
    if sys.argv[1] == "mistake":
        report_error(FcEvalError("the text is too short: give more"))
        sys.exit(USER_ERROR_EXIT)
    import time

    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    main()
