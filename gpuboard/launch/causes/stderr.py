"""The line of a rank's stderr that names its error."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from gpuboard.agent.launch.rank.traceback_text import innermost, last_traceback
from gpuboard.launch.causes.cause import symptom_of
from gpuboard.model.text import clean

TAIL = 200  # lines of a rank's stderr to keep: a long traceback and what follows it

# Advice and warnings that programs print after their error
_HINT = re.compile(
    r"HYDRA_FULL_ERROR|resource_tracker|leaked (semaphore|shared_memory)|Warning\b|warnings?\.warn\(|_warn\(|"
    r"^\s*\[?W\d*[ :\]]|\[W\d+ |might be asynchronously reported|For debugging consider|Compile with `?TORCH_USE|"
    r"assertion tracking was not enabled|Search for .* in https?://|To enable traceback|^[|+\s-]*$|^wandb: ",
    re.IGNORECASE,
)
# What native code prints when it ends the process: counts also after a traceback, from a handler's or another thread's
_FATAL = re.compile(
    r"what\(\): |^terminate called|^\S*: .*Assertion .* failed|^Fatal Python error|\bFATAL\b|\[E\d+ |^E\d{4} |"
    r"^free\(\)|^malloc|^double free|^corrupted |^munmap_chunk|stack smashing|panicked at"
)
# faulthandler's stack, innermost frame first
_FRAME = re.compile(r'^ +File "(.+)", line (\d+) in (.+)$')
_RANK = re.compile(r"^ ?\[rank\d+\]: ")  # torch's prefix of each line of an uncaught exception
_TORCHRUN = re.compile(r"[/ ]torch/distributed/elastic/")  # its log messages, of no further use
# Exceptions about the failure of child processes
CHILD_FAILED = (
    "subprocess.CalledProcessError:",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "torch.multiprocessing.spawn.ProcessExitedException:",
    "concurrent.futures.process.BrokenProcessPool:",
    "RuntimeError: DataLoader worker (pid",
)
_ERROR = re.compile(
    r"Error\b|Exception\b|\b(error|fatal|failed|failure|exception|aborted|killed|assertion|denied|cannot|unable|invalid|"
    r"no such|not found|no space|too many|usage)\b",
    re.IGNORECASE,
)
# Lines of a log, and values in them, that are no error whatever their words
_REPORT = re.compile(r"\b(INFO|DEBUG)\b|\blevel=(info|debug)\b")
_VALUE = re.compile(r"\berror\b[ :=]*[-+\d]*\.\d+", re.IGNORECASE)  # a loss: "test error: 0.31"


def evidence(tail: Iterable[str]) -> str:
    """Return the newest error among the lines of ``tail``, the end of a rank's stderr; "" if they are only advice.

    The exception of the last traceback counts, not the lines after it, unless native code reported an error there.
    """
    lines = [_unprefixed(line) for line in tail]
    last = last_traceback("\n".join(lines))
    after = lines
    if last is not None:
        kind, message, place = last
        first = kind + (f": {message.splitlines()[0]}" if message else "")
        at = max(number for number, line in enumerate(lines) if first in line)
        if first.endswith(": "):  # the message begins on the next lines, which are indented (multiprocessing's)
            more = itertools.takewhile(lambda line: line.startswith("  "), lines[at + 1 :])
            first += " ".join(line.strip() for line in more)
        after = lines[at + 1 :]
    fatal = [line for line in after if _FATAL.search(line) and not _HINT.search(line)]
    if fatal:
        what = [line for line in fatal if "what():" in line]  # says more than "terminate called" around it
        return f"last error on stderr: {clean((what or fatal)[-1].strip() + _crashed_at(after))}"
    if last is not None:
        where = f" at {place[0]}:{place[1]}" if place[0] else ""
        return f"last error on stderr: {clean(first)}{clean(where)}"
    lines = [line for line in lines if not _HINT.search(line)]
    last_line = clean(lines[-1].strip()) if lines else ""
    errors = [line for line in lines if _ERROR.search(_VALUE.sub("", line)) and not _REPORT.search(line)]
    if errors:
        error = clean(errors[-1].strip())
        return f"last error on stderr: {error}" + (f"; last line: {last_line}" if last_line != error else "")
    return f"last line on stderr: {last_line}" if last_line else ""


def root_error(tail: Iterable[str]) -> str:
    """Return the newest error that explains the others: the one of a child process, not the exception about its end;
    not a connection that was lost to a process which failed before."""
    lines = [line for line in map(_unprefixed, tail) if not _TORCHRUN.search(line)]
    failed = next((at for at, line in enumerate(lines) if line.startswith(CHILD_FAILED)), None)
    if failed is not None:
        lines = lines[: _last_header(lines[:failed])]
    newest = found = evidence(lines)
    while symptom_of(found) == "lost":
        lines = lines[: _last_header(lines)]
        found = evidence(lines)
    return newest if found.startswith("last line") else found or newest


def _unprefixed(line: str) -> str:
    return _RANK.sub("", line)


def _last_header(lines: list[str]) -> int:
    """Return the index of the last traceback's first line, 0 without one."""
    return max((at for at, line in enumerate(lines) if line == "Traceback (most recent call last):"), default=0)


def _crashed_at(lines: Iterable[str]) -> str:
    """Return the place in the stack that faulthandler wrote of the thread that crashed; "" without one."""
    stack = itertools.dropwhile(lambda line: not line.startswith("Current thread "), lines)
    found = list(itertools.takewhile(bool, map(_FRAME.match, itertools.islice(stack, 1, None))))
    frames = [(match[1], int(match[2]), match[3]) for match in reversed(found) if match]
    file, line, function = innermost(list(frames))
    return f" at {file}:{line} in {function}" if file else ""
