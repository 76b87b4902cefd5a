"""Why an agent ended: exit code and stderr of its start → the error to show (pure)."""

from __future__ import annotations

from gpuboard.model.text import clean
from gpuboard.transport.base import TransportError

STDIN_READ = 93  # exit code of the loader without its input, and of a shell that reads that input (bundle.GUARD)

_REMEDY = "make ~/.bashrc (~/.zshenv, ~/.cshrc, config.fish) there do so on a terminal only: `[ -t 0 ] || return`"
_NOT_FOUND = ("not found", "no such file", "unknown command", "cannot execute", "could not find", "permission denied")


def explain_exit(code: int | None, stderr: bytes, python: str) -> TransportError:
    """Return the error for the end of an agent.

    ``code``: exit code, negative for a signal, None when unknown; ``stderr``: its last output there.
    For a missing program sh and fish exit with 127, csh with 1, each with its own message.
    """
    if code == STDIN_READ:
        words = "a start-up file of the login shell there reads standard input, or starts another shell"
        return TransportError("exited", words, _REMEDY)
    text = stderr.decode("utf-8", "replace")
    lines = [clean(line) for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if own := [line for line in lines if line.startswith("gpuboard: python 3.6")]:
        return TransportError(
            "no-python", own[-1].removeprefix("gpuboard: "), "set `python` in the config to a newer one"
        )
    missing = [line for line in lines if any(words in line.lower() for words in _NOT_FOUND)]
    if code == 1:  # csh names the interpreter or its path; other lines are those of start-up files
        name = python.rpartition("/")[2]
        missing = [line for line in missing if line.partition(": ")[0].rpartition("/")[2] == name]
    if code in {126, 127} or (code == 1 and missing and "Traceback" not in text):
        words = f"{python} cannot be started there" + (f" ({(missing or lines)[-1]})" if lines else "")
        return TransportError("no-python", words, "install python3 (3.6 or later) or set `python` in the config")
    if code is not None and code < 0:
        return TransportError("exited", f"the agent was killed by signal {-code}" + (f" ({last})" if last else ""))
    detail = f": {last}" if last else ""
    return TransportError("exited", f"the agent ended{'' if code is None else f' with exit code {code}'}{detail}")


def not_started(timeout_s: float, printed: str) -> TransportError:
    """Return the error for a connection on which no agent started; ``printed``: output of start-up files."""
    detail = f" (it printed: {printed})" if printed else ""
    words = f"connected, but its shell or python3 did not start the agent in {timeout_s:.0f} s{detail}"
    return TransportError("timeout", words, f"if a start-up file of the login shell reads standard input, {_REMEDY}")
