"""The folders of gpuboard's files: XDG folders from an environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SITE_CONFIG = Path("/etc/gpuboard/config.toml")


def _base(env: Mapping[str, str], variable: str, below_home: str) -> Path:
    """Return the XDG folder named by ``variable``; a relative value is ignored, as the specification requires.

    So is a relative HOME: the keeper and the head of a detached run have another working directory.
    """
    value, home = env.get(variable, ""), env.get("HOME", "")
    root = Path(value) if value.startswith("/") else Path(home if home.startswith("/") else _home()) / below_home
    return root / "gpuboard"


def _home() -> str:
    """Return the home folder from the user database: services and containers may run without HOME."""
    import os
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/nonexistent"


def user_config(env: Mapping[str, str]) -> Path:
    """Return the path of the user's config file (it need not exist)."""
    return _base(env, "XDG_CONFIG_HOME", ".config") / "config.toml"


def state_dir(env: Mapping[str, str]) -> Path:
    """Return the folder of rank maps, runs and the keeper's records; it may be on a shared home."""
    return _base(env, "XDG_STATE_HOME", ".local/state")


def cache_dir(env: Mapping[str, str]) -> Path:
    """Return the folder of caches; it may be on a shared home."""
    return _base(env, "XDG_CACHE_HOME", ".cache")


def make_private(folder: str | Path) -> None:
    """Create a folder and its missing parents with mode 0700, even where the umask is 0. Raises OSError."""
    path = Path(folder)
    missing = [each for each in path.parents if not each.exists()]
    for each in (*reversed(missing), path):
        each.mkdir(mode=0o700, exist_ok=True)
