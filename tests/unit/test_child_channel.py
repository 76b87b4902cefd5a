"""How the end of a child process is reported: its own exit code, and never a signal that the channel itself sent."""

from __future__ import annotations

import queue

import pytest

from gpuboard.transport.base import TransportError
from gpuboard.transport.exit_errors import explain_exit
from gpuboard.transport.process import ChildChannel, Exit
from gpuboard.transport.spawn import spawn
from tests.kernel import Under, on_each_kernel


class Ended:
    """Keeps the error that a channel ended with."""

    def __init__(self) -> None:
        self.error: queue.SimpleQueue[TransportError] = queue.SimpleQueue()

    def connected(self) -> None:
        """Nothing to do."""

    def received(self, data: bytes) -> None:
        """Ignore output."""

    def ended(self, error: TransportError) -> None:
        """Keep the error."""
        self.error.put(error)


def explain(ending: Exit) -> TransportError:
    return explain_exit(ending.code, ending.stderr, "python3")


def ended(under: Under, command: str, exit_s: float = 60.0) -> str:
    """Run a command as a child; return why its channel ended. The channel itself would wait 0.05 s when closed."""
    handler = Ended()
    channel = ChildChannel(handler, explain, end_s=0.05, exit_s=exit_s)
    under(lambda: channel.start(spawn(["/bin/sh", "-c", command])))
    return str(handler.error.get(timeout=60))


@on_each_kernel
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exec >&-; sleep 1; exit 5", "the agent ended with exit code 5"),
        # more on stderr than its pipe takes, after the end of stdout
        ("exec >&-; yes | head -c 1000000 >&2; echo bye >&2; exit 5", "the agent ended with exit code 5: bye"),
        ("exec >&-; sleep 0.2; kill -9 $$", "the agent was killed by signal 9"),
    ],
)
def test_a_child_that_closes_its_output_may_take_its_time_to_end(under: Under, command: str, words: str) -> None:
    assert ended(under, command) == words


@on_each_kernel
def test_a_signal_that_the_channel_sent_is_no_cause(under: Under) -> None:
    assert ended(under, "exec >&-; exec sleep 600", exit_s=0.1) == (
        "the agent ended: closed its output but did not exit within 0.1 s; gpuboard killed it"
    )
