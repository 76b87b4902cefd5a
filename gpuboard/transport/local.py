"""Agents on this machine: child processes, without a shell in between."""

from __future__ import annotations

from collections.abc import Callable

from gpuboard.transport.base import Handler, TransportError
from gpuboard.transport.process import ChildChannel, Ending
from gpuboard.transport.spawn import agent_command, spawn, take_prestarted

_END_S = 2.0  # an agent ends this soon after its connection, whatever NVML does
_LAUNCH_END_S = 10.0  # a guard killed sooner may leave orphaned processes: 1.6 s of grace, 4 s until all are killed


class LocalTransport:
    """Starts agents as child processes. ``command`` returns the command line (tests replace it)."""

    def __init__(self, command: Callable[[], list[str]] = agent_command) -> None:
        self._command = command
        self._channels: list[ChildChannel] = []

    def open(self, host: str, role: str, handler: Handler, command: str | None = None) -> ChildChannel:
        """Start an agent; where the program cannot be started, the channel ends with kind ``no-python``."""
        channel = ChildChannel(handler, _explain, end_s=_LAUNCH_END_S if role == "launch" else _END_S)
        self._channels = [c for c in self._channels if not c.over] + [channel]
        try:
            usual = command is None and role == "node" and self._command is agent_command
            child = (take_prestarted() if usual else None) or spawn(
                ["/bin/sh", "-c", command] if command else self._command()
            )
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
