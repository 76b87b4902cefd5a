"""The start and the end of a keeper's process."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress

from gpuboard.keeper.daemon.keeper import Keeper
from gpuboard.keeper.daemon.loop import log, write_log_to
from gpuboard.keeper.runtime_dir import KeeperError, acquire
from gpuboard.keeper.timing import TIMING


def main() -> None:
    """Run the keeper of the folder named by the first argument, as keeper/client.py starts it.

    A second argument is a KeeperTiming as a JSON object of the values that differ.

    fd 1 is a pipe to the command that started it, and gets ``ready`` (also if another keeper is running) or an error.
    """
    folder = sys.argv[1]
    os.umask(0o077)
    os.chdir("/")
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write("gpuboard-keeper")  # what ps and top show
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    report = os.dup(1)
    try:
        place = acquire(folder, timeout_s=5.0)
        write_log_to(f"{folder}/log")
    except (KeeperError, OSError) as error:
        _report(report, str(error))
        sys.exit(1)
    _report(report, "ready")
    if place is None:
        return
    timing = TIMING._replace(**json.loads(sys.argv[2])) if len(sys.argv) > 2 else TIMING
    keeper = Keeper(folder, place, timing)
    try:
        keeper.run()
    except Exception:
        import traceback  # late: 4 ms of every start

        log(traceback.format_exc())
    keeper.place.close()


def _report(pipe: int, message: str) -> None:
    with suppress(OSError):  # the command may have ended
        os.write(pipe, f"{message}\n".encode())
    os.close(pipe)
