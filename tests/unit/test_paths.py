"""The folders of the XDG specification, also where the environment says little."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from gpuboard.paths import make_private, state_dir, user_config


@pytest.mark.parametrize(
    ("env", "state"),
    [
        ({"HOME": "/h"}, "/h/.local/state/gpuboard"),
        ({"HOME": "/h", "XDG_STATE_HOME": "/s"}, "/s/gpuboard"),
        ({"HOME": "/h", "XDG_STATE_HOME": "relative"}, "/h/.local/state/gpuboard"),
        ({"HOME": "/h", "XDG_STATE_HOME": ""}, "/h/.local/state/gpuboard"),
    ],
)
def test_state_folder(env: dict[str, str], state: str) -> None:
    assert state_dir(env) == Path(state)


@pytest.mark.parametrize("env", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_without_home_the_user_database_knows_it(env: dict[str, str]) -> None:
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    assert user_config(env) == home / ".config" / "gpuboard" / "config.toml"


def test_folders_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "file")
