"""Replacing a file of our own: in one step, closed to others, and not at all where that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuboard.files import write_private


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text("old")
    file.chmod(0o644)
    write_private(file, b"new")
    assert (file.read_bytes(), file.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (b"new", 0o600, [file])


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "state.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
