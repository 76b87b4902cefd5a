"""The run's private folder on a node: the ranks' sockets and what torch's ``@record`` writes. Removed at the end."""

import os
import shutil

MYPY = False
if MYPY:
    from typing import Any, Dict, List

_SHORT = 60  # characters: the address of a socket has at most 108 bytes (unix(7))


def create(config: "Dict[str, Any]") -> str:
    """Create the folder and return its path; "" if there can be none that is this user's alone."""
    for folder in _paths(config):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # that of a supervisor which this one replaces
            found = os.lstat(folder)
            if found.st_uid != os.getuid() or found.st_mode & 0o170077 != 0o040000:
                continue
        except OSError:  # a TMPDIR of another node
            continue
        return folder
    return ""


def remove(config: "Dict[str, Any]") -> None:
    """Remove the folder."""
    for folder in _paths(config):
        shutil.rmtree(folder, ignore_errors=True)  # refuses a link; another user's is not writable


def _paths(config: "Dict[str, Any]") -> "List[str]":
    """Return where the folder of a run may be on its node, the preferred one first."""
    names = config["run"], config["node_rank"], config["attempt"]  # an earlier attempt may end late and remove its own
    parents = dict.fromkeys((os.environ.get("TMPDIR") or "/tmp", "/tmp"))
    return ["%s/gpuboard-%s-%d-%d" % (parent, *names) for parent in parents if len(parent) <= _SHORT]
