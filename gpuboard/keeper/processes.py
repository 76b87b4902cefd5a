"""Processes on this host that hold a lease after its holder's end: carriers, and orphans that may start carriers."""

from __future__ import annotations

import os

from gpuboard.agent.proc import ProcessStat, own_pids, read_environ, read_process


def carriers(lease: str) -> list[int]:
    """Return the pids of this user's processes that were started with GPUBOARD_LEASE=``lease``."""
    wanted = b"GPUBOARD_LEASE=" + lease.encode()
    return [pid for pid in own_pids() if wanted in (read_environ(pid) or ())]  # None: ended, or a setuid program


def orphans(session: int, group: int, created_s: float) -> list[int]:
    """Return this user's processes that the ended holder left behind and that may have its variables.

    A subshell (``( … ) &``, a loop in the background) has them, but /proc/PID/environ does not show them: it holds what
    a program was *executed* with, and a fork executes none. Such a process started after the lease (``created_s``,
    seconds since boot), is in the holder's session or process group, and is orphaned: its parent is outside that
    session, unlike that of commands typed later in the same terminal.
    """
    since = int(created_s * os.sysconf("SC_CLK_TCK")) - 1  # start times are truncated to whole ticks
    family: dict[int, ProcessStat] = {}
    for pid in own_pids():
        process = read_process(pid)
        if process is not None and process.state not in "ZX" and (process.session, process.group) != (0, 0):
            family[pid] = process
    young = {
        pid: process
        for pid, process in family.items()
        if process.start >= since and (process.session == session or process.group == group) and pid != os.getpid()
    }
    return [pid for pid, process in young.items() if _orphaned(process, young, session)]


def _orphaned(process: ProcessStat, young: dict[int, ProcessStat], session: int) -> bool:
    seen = {process.pid}
    while process.parent in young and process.parent not in seen:
        process = young[process.parent]
        seen.add(process.pid)
    if process.parent <= 1:
        return True
    parent = read_process(process.parent)
    return parent is None or parent.session != session
