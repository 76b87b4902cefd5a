"""The keeper's calls to a node."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from gpuboard.keeper.daemon.calls import Calls, NodeAnswer


class Echo(Calls):
    def _answer(self, op: str, args: dict[str, Any]) -> NodeAnswer:
        return NodeAnswer(op)


def test_a_thread_that_cannot_start_is_a_lost_call_and_the_next_call_tries_again() -> None:
    calls, answers = Echo("gpu01", 30.0), queue.SimpleQueue[NodeAnswer]()

    def start(self: threading.Thread) -> None:
        """Fail as at the limit of the user's processes."""
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(2):
            calls.call("touch", {}, answers.put)
            assert answers.get(timeout=0) == NodeAnswer(None, "lost", "can't start new thread")
    calls.call("touch", {}, answers.put)
    assert answers.get() == NodeAnswer("touch")
    calls.close()
