"""The run's private folder on a node, for the sockets of the ranks. The guard removes it at the end."""

import os

MYPY = False
if MYPY:
    from typing import Any, Dict


def path(config: "Dict[str, Any]") -> str:
    """Return the folder of a run on its node; short, since the address of a socket has at most 108 bytes (unix(7))."""
    return "/tmp/gpuboard-%s-%d" % (config["run"], config["node_rank"])


def create(config: "Dict[str, Any]") -> str:
    """Create the folder and return its path; without it (a full disk) ranks have no worker servers."""
    folder = path(config)
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        pass  # a supervisor that replaces a lost one, or another user's: then the ranks cannot write there
    return folder


def remove(config: "Dict[str, Any]") -> None:
    """Remove the folder and its sockets."""
    folder = path(config)
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        pass  # it does not exist, or is another user's
