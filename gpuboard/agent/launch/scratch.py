"""The run's private folder on a node: the ranks' sockets and what torch's ``@record`` writes. Removed at the end."""

import os
import shutil

MYPY = False
if MYPY:
    from typing import Any, Dict

_SHORT = 60  # characters: the address of a socket has at most 108 bytes (unix(7))


def path(config: "Dict[str, Any]") -> str:
    """Return the folder of a run on its node."""
    parent = os.environ.get("TMPDIR") or "/tmp"
    names = config["run"], config["node_rank"], config["attempt"]  # an earlier attempt may end late and remove its own
    return "%s/gpuboard-%s-%d-%d" % (parent if len(parent) <= _SHORT else "/tmp", *names)


def create(config: "Dict[str, Any]") -> str:
    """Create the folder and return its path; "" if there can be none that is this user's alone."""
    folder = path(config)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:  # that of a supervisor which this one replaces
        found = os.lstat(folder)
        return folder if found.st_uid == os.getuid() and found.st_mode & 0o170077 == 0o040000 else ""
    except OSError:
        return ""
    return folder


def remove(config: "Dict[str, Any]") -> None:
    """Remove the folder."""
    shutil.rmtree(path(config), ignore_errors=True)  # refuses a link; another user's is not writable
