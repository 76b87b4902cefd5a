"""The agent's entry point: take over the connection, read the start line, run the requested role."""

import os

from gpuboard.agent import protocol

MYPY = False
if MYPY:
    from typing import Any, Dict

ROLES = ("node", "launch", "head", "runs")


def main() -> None:
    """Run the agent on fds 0 and 1 until the connection ends, then end the process.

    Exit codes: 0 the connection ended, 1 an error (sent to the client as a ``stderr`` event), 2 an unknown role.
    """
    channel = protocol.take_over()
    code = 1
    try:
        start = channel.read_start()
        code = 0 if start is None else _run(channel, str(start.get("role")), start.get("config") or {})
    except protocol.BadStream as error:
        channel.event("stderr", {"text": "gpuboard agent: %s\n" % error})
    except Exception:
        import traceback  # late: only for errors

        channel.event("stderr", {"text": traceback.format_exc()})
    channel.drain(0.5)
    os._exit(code)  # no exit handlers: a forked child, a library or a thread must not delay the end


def _run(channel: protocol.AgentChannel, role: str, config: "Dict[str, Any]") -> int:
    if role == "node":
        from gpuboard.agent import node  # late: only this role needs it

        node.run(channel, config)
        return 0
    if role == "launch":
        from gpuboard.agent.launch import guard  # late: only this role needs it

        guard.run(channel, config)
        return 0
    if role == "head":
        from gpuboard.agent.launch import head_start  # late: only this role needs it

        head_start.run(channel, config)
        return 0
    if role == "runs":
        from gpuboard.agent.runs import role as runs  # late: only this role needs it

        runs.run(channel, config)
        return 0
    channel.event("stderr", {"text": "gpuboard agent: no role %r; this agent has %s\n" % (role, ", ".join(ROLES))})
    return 2
