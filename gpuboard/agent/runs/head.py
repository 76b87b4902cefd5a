"""Whether the head of a run still runs, by what it wrote about itself into the run's folder."""

import os

from gpuboard.agent import proc
from gpuboard.agent.claims.files import shared_with_others

MYPY = False
if MYPY:
    from typing import Any, Dict, Optional


def alive(head: "Dict[str, Any]", folder: str) -> "Optional[bool]":
    """Return whether the head runs; None if it is on another host, or that is not known.

    ``head``: that of the run's state.json. Raises KeyError, TypeError and ValueError for an invalid one.

    A host's name may change, so it decides only where nothing better was written: ``namespace`` identifies the
    processes of one boot that are seen here, and ``machine`` a head of an earlier boot. Images of one disk can have
    equal machine ids, so that ``folder``, the run's, has to be on a file system of this machine alone; "": it is not.
    """
    here = head["host"] == os.uname().nodename
    if head["boot_id"] != proc.boot_id():
        machine = head.get("machine")
        own = bool(machine and machine == proc.machine_id() and folder) and not shared_with_others(folder)
        return False if here or own else None
    process = proc.read_process(int(head["pid"]))
    if process is not None and process.state not in "ZX" and process.start == int(head["start"]):
        return True
    namespace = head.get("namespace")
    seen = namespace == proc.pid_namespace() if namespace else here
    return False if seen else None  # else it may be in another container
