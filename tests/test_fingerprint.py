"""Digests of files are remembered only as long as the file cannot have changed; damaged memory is made again."""

import hashlib
import mmap
import os
import time

import pytest

from fc_eval.errors import FcEvalError
from fc_eval.results import fingerprint
from fc_eval.results.fingerprint import file_sha256, files_digest, package_versions

pytestmark = pytest.mark.usefixtures("own_cache")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that counts as settled at once, and as large."""
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)
    monkeypatch.setattr(fingerprint, "REMEMBERED_BYTES", 3)
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    return path


def entries(own_cache):
    return list((own_cache / "digests").iterdir())


def test_a_digest_is_read_once(file, own_cache, monkeypatch):
    assert file_sha256(file) == sha256(b"one")
    assert len(entries(own_cache)) == 1
    monkeypatch.setattr(hashlib, "file_digest", None)  # nothing is read any more
    assert file_sha256(file) == sha256(b"one")


def test_a_small_file_is_read_each_time(file, own_cache, monkeypatch):
    monkeypatch.setattr(fingerprint, "REMEMBERED_BYTES", 4)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 3) as pages:
        pages[:] = b"two"  # from here on the page is dirty, and a write to it sets no time
        state = fingerprint._state(file)
        assert file_sha256(file) == sha256(b"two")
        pages[:] = b"six"
        assert file_sha256(file) == sha256(b"six")
        assert fingerprint._state(file) == state
    assert not (own_cache / "digests").exists()


def test_other_contents_of_the_same_size_and_time_are_another_file(file):
    stat = file.stat()
    assert file_sha256(file) == sha256(b"one")
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert file_sha256(file) == sha256(b"two")


def test_a_file_put_in_its_place_is_another_file(file, tmp_path):
    stat = file.stat()
    assert file_sha256(file) == sha256(b"one")
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, file)
    assert file_sha256(file) == sha256(b"two")


def test_a_damaged_entry_is_made_again(file, own_cache):
    file_sha256(file)
    (entry,) = entries(own_cache)
    whole = entry.read_bytes()
    other = sha256(b"other").encode()
    damaged = [b"", whole[:64], whole[:-1], whole[:30], b"\xff" * len(whole), other + whole[64:], other + b" " + other]
    for content in damaged:
        entry.write_bytes(content)
        assert file_sha256(file) == sha256(b"one")
        assert entry.read_bytes() == whole


def test_an_entry_of_another_file_proves_nothing(file, own_cache, tmp_path):
    file_sha256(file)
    (entry,) = entries(own_cache)
    other = tmp_path / "other"
    other.write_bytes(b"two")
    file_sha256(other)
    (second,) = set(entries(own_cache)) - {entry}
    second.write_bytes(entry.read_bytes())
    assert file_sha256(other) == sha256(b"two")


def test_a_file_that_has_just_changed_is_not_remembered(file, own_cache, monkeypatch):
    monkeypatch.setattr(fingerprint, "SETTLED_S", 2.0)
    assert file_sha256(file) == sha256(b"one")
    assert not (own_cache / "digests").exists()
    monkeypatch.setattr(time, "time", lambda: file.stat().st_ctime + 3)
    file_sha256(file)
    assert len(entries(own_cache)) == 1


def test_a_file_that_is_written_while_it_is_read_has_no_digest(file, monkeypatch):
    def digest(stream, name):
        file.write_bytes(b"longer")
        return hashlib.sha256(stream.read())

    monkeypatch.setattr(hashlib, "file_digest", digest)
    with pytest.raises(FcEvalError, match="was written while it was read"):
        file_sha256(file)


@pytest.mark.parametrize("kind", ["file", "folder where the entry goes"])
def test_a_cache_that_cannot_be_written_only_costs_time(file, own_cache, kind):
    if kind == "file":
        own_cache.write_text("")
    else:
        file_sha256(file)
        (entry,) = entries(own_cache)
        entry.unlink()
        entry.mkdir()
    assert file_sha256(file) == sha256(b"one")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FcEvalError, match=r"nowhere: No such file or directory \(ENOENT\)"):
        files_digest([tmp_path / "nowhere"])
    with pytest.raises(FcEvalError, match=r"Is a directory \(EISDIR\)"):
        file_sha256(tmp_path)


def test_another_version_is_seen_and_a_missing_package_said(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert package_versions(["made_up"]) == {"made_up": "missing"}
    for now in ("1.0", "1.1"):
        for before in tmp_path.glob("*"):
            (before / "METADATA").unlink()
            before.rmdir()
        folder = tmp_path / f"made_up-{now}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made_up\nVersion: {now}\n")
        os.utime(tmp_path, ns=(0, int(now[-1])))  # installing takes longer than the clock's tick; this does not
        assert package_versions(["made_up"]) == {"made_up": now}
    package_versions(["made_up"]).clear()  # the caller's own
    assert package_versions(["made_up"]) == {"made_up": "1.1"}
