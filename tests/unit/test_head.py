"""The head's loop: what it concludes from silence when it could not listen."""

from __future__ import annotations

import io
import queue
import time
from pathlib import Path
from typing import Any

from gpuboard.config import Settings
from gpuboard.launch.crew import Heard
from gpuboard.launch.head import Head
from gpuboard.launch.output import Screen
from gpuboard.launch.runs import RunFolder
from gpuboard.launch.watch import ECHO_WAIT_S
from gpuboard.transport.connector import Connector
from tests.unit.test_plan import planned
from tests.unit.test_watch import BOOM, RESET


class Inbox(queue.SimpleQueue[Any]):
    """That of a process which stands still when it has nothing to do; afterwards its main thread runs first."""

    def __init__(self, meanwhile: Heard) -> None:
        super().__init__()
        self._meanwhile: Heard | None = meanwhile

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.empty() or self._meanwhile is None:
            return super().get(block, timeout)
        time.sleep(ECHO_WAIT_S + 0.1)
        self.put(self._meanwhile)
        self._meanwhile = None
        raise queue.Empty


def test_a_head_that_stood_still_hears_the_cause_before_it_takes_the_echo_for_it(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    screen = Screen(io.StringIO(), io.StringIO())
    head = Head(planned(), RunFolder(env, "rabc"), screen, connector=Connector(Settings()), nodes={}, read_gpus=None)
    head._gone = True
    head._inbox = Inbox(Heard("gpu01", BOOM))
    head._inbox.put(Heard("gpu02", RESET))
    head._pump(lambda: head._watch.cause is not None, None)
    assert [(verdict.rank, verdict.kind) for verdict in head.view().verdicts] == [(1, "raised")]
    screen.close()
