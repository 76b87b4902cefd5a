"""Agents on this machine: child processes, without a shell in between."""

from __future__ import annotations

from collections.abc import Callable

from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.process import ChildChannel, Ending
from gpuboard.transport.spawn import agent_command, spawn, take_prestarted

_END_S = 2.0  # within this an agent ends after its connection, whatever NVML does
_LAUNCH_END_S = 10.0  # a guard killed sooner may leave what it was about to end: 1.6 s of patience, 4 s of killing


class LocalTransport:
    """Starts agents as children. ``command`` makes the command line (tests replace it)."""

    def __init__(self, command: Callable[[], list[str]] = agent_command) -> None:
        self._command = command
        self._channels: list[ChildChannel] = []

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> ChildChannel:
        """Start an agent. A program that cannot be started ends the channel with kind ``no-python``."""
        channel = ChildChannel(handler, _explain, end_s=_LAUNCH_END_S if role == "launch" else _END_S)
        self._channels = [c for c in self._channels if not c.over] + [channel]
        try:
            ours = command is None and role == "node" and self._command is agent_command
            ahead = take_prestarted() if ours else None
            child = ahead or spawn(["/bin/sh", "-c", command] if command else self._command())
        except OSError as error:
            channel.fail(TransportError("no-python", f"the agent cannot be started: {error}"))
            return channel
        channel.start(child)
        return channel

    def close(self) -> None:
        """End every child at once."""
        for channel in self._channels:
            channel.close()


def _explain(ending: Ending) -> TransportError:
    from gpuboard.transport.exit_errors import explain_exit  # late: only when something is wrong

    return explain_exit(ending.code, ending.stderr, agent_command()[0])
