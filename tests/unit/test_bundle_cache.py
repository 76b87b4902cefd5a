"""The bundle of the last process: used while nothing that it is made from has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuboard.transport.bundle_cache import KeptBundle
from tests.waiting import until

DATA = bytes(range(256)) * 8


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "module.py"
    path.write_text("one = 1\n")
    return path


def kept_file(source: Path) -> Path:
    (found,) = source.parent.glob("cache/gpuboard/*")
    return found


def test_a_bundle_is_kept_for_the_owner_alone(source: Path) -> None:
    kept = KeptBundle("node", [source])
    assert (kept.load(), kept.usable) == (None, True)
    kept.store(DATA)
    assert KeptBundle("node", [source]).load() == DATA
    assert KeptBundle("launch", [source]).load() is None
    assert (kept_file(source).stat().st_mode & 0o777, kept_file(source).parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_source_that_has_changed_outdates_it(source: Path, keep_times: bool) -> None:
    KeptBundle("node", [source]).store(DATA)
    before = source.stat()

    def written() -> bool:
        source.write_text("one = 2\n")
        return source.stat().st_mtime_ns > before.st_mtime_ns

    until(written, "a step of the clock of files: 4 ms before Linux 6.13")
    if keep_times:
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert KeptBundle("node", [source]).load() is None


def test_another_list_of_sources_outdates_it(source: Path) -> None:
    KeptBundle("node", [source]).store(DATA)
    assert KeptBundle("node", [source, source]).load() is None
    assert KeptBundle("node", []).load() is None
    assert KeptBundle("node", [source.with_name("missing.py")]).load() is None


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "garbage", "written by others", "a link", "a folder"])
def test_a_file_that_cannot_be_trusted_is_replaced(source: Path, damage: str) -> None:
    KeptBundle("node", [source]).store(DATA)
    file = kept_file(source)
    content = file.read_bytes()
    if damage == "written by others":
        file.chmod(0o666)
    elif damage in {"a link", "a folder"}:
        file.rename(source.with_name("other"))
        file.symlink_to(source.with_name("other")) if damage == "a link" else file.mkdir()
    else:
        changed = content[:-1] + bytes([content[-1] ^ 1])
        file.write_bytes({"empty": b"", "cut": content[:-1], "changed": changed, "garbage": b"\xff" * 99}[damage])
    assert KeptBundle("node", [source]).load() is None
    KeptBundle("node", [source]).store(DATA)
    assert KeptBundle("node", [source]).load() == (None if damage == "a folder" else DATA)


def test_nothing_is_kept_where_the_folder_cannot_be_made(source: Path) -> None:
    (source.parent / "cache").write_text("")
    kept = KeptBundle("node", [source])
    kept.store(DATA)
    assert (kept.usable, kept.load()) == (False, None)


def test_nothing_is_kept_without_sources(source: Path) -> None:
    assert not KeptBundle("node", []).usable
    KeptBundle("node", []).store(DATA)
    assert KeptBundle("node", []).load() is None
