"""Asks the pip of this environment, so that whatever index, proxy or certificate the user has configured is used."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from fc_eval.errors import FcEvalError

INSTEAD = "or give a copy of the model with model.path=FILE.gguf"
# A source distribution would be built, that is, run.
ONLY_WHEELS = "--only-binary=:all:"
# pip has no command that names a file without fetching it: where an index serves no metadata of its own, the dry run
# of an install fetches the whole wheel, unseen and without resuming. So its finder is asked, which is the same in
# pip 23 to 26 but not a public interface: where it has changed, the script says so, and the dry run has to do.
FINDER_CHANGED = 3
FINDER = f"""
import json, sys
try:
    from pip._internal.commands import create_command
    from pip._internal.req.constructors import install_req_from_line
    command = create_command("download")
    with command.main_context():
        options, (line,) = command.parse_args(sys.argv[1:])
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        wanted = install_req_from_line(line).req
        best = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate
        link = best and best.link
        print(json.dumps(link and [link.url_without_fragment, link.hash_name, link.hash]))
except (ImportError, AttributeError, TypeError):
    sys.exit({FINDER_CHANGED})
"""


class Wheel(NamedTuple):
    """Where pip finds the wheel of a requirement; `sha256` is None where the index names none."""

    url: str
    sha256: str | None


def locate_wheel(requirement: str) -> Wheel:
    """Where pip would download a requirement's wheel from.

    Raises:
        FcEvalError: this environment has no pip, or pip finds no wheel.
    """
    done = _run("-c", FINDER, ONLY_WHEELS, requirement)
    if done.returncode == FINDER_CHANGED:
        return _locate_by_dry_run(requirement)
    found = json.loads(done.stdout) if done.returncode == 0 else None
    if found is None:
        raise FcEvalError(
            f"pip finds no wheel of {requirement}: check the network and pip's index configuration, {INSTEAD}"
        )
    url, hash_name, digest = found
    return Wheel(url, digest if hash_name == "sha256" else None)


def _locate_by_dry_run(requirement: str) -> Wheel:
    report = json.loads(
        _pip("install", "--dry-run", "--ignore-installed", "--no-deps", ONLY_WHEELS, "--report=-", requirement)
    )
    info = report["install"][0]["download_info"]
    return Wheel(info["url"], info.get("archive_info", {}).get("hashes", {}).get("sha256"))


def download_with_pip(requirement: str, target: Path) -> None:
    """Downloads a requirement's wheel to `target` with `pip download`, which cannot resume.

    Raises:
        FcEvalError: this environment has no pip, or it failed.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _pip("download", "--no-deps", ONLY_WHEELS, f"--dest={scratch}", requirement)
        (wheel,) = Path(scratch).glob("*.whl")
        os.replace(wheel, target)


def _pip(*args: str) -> str:
    done = _run("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *args)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or ["it does not say why"]
        raise FcEvalError(
            f"pip failed ({lines[-1].removeprefix('ERROR: ')}): check the network and pip's index configuration, "
            f"{INSTEAD}"
        )
    return done.stdout


def _run(*args: str) -> "subprocess.CompletedProcess[str]":
    if importlib.util.find_spec("pip") is None:
        raise FcEvalError(
            f"this Python environment has no pip to fetch the model with: run `python -m ensurepip`, {INSTEAD}"
        )
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
