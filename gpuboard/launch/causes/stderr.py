"""The line of a rank's stderr that names its error."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from gpuboard.agent.launch.rank.traceback_text import last_traceback
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
_ERROR = re.compile(
    r"Error\b|Exception\b|\b(error|fatal|failed|failure|exception|aborted|killed|assertion|denied|cannot|unable|invalid|"
    r"no such|not found|no space|too many|usage)\b",
    re.IGNORECASE,
)


def evidence(tail: Iterable[str]) -> str:
    """Return the newest error among the lines of ``tail``, the end of a rank's stderr; "" if they are only advice.

    The exception of the last traceback counts, not the lines after it, unless native code reported an error there.
    """
    lines = list(tail)
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
        return f"last error on stderr: {clean((what or fatal)[-1].strip())}"
    if last is not None:
        where = f" at {place[0]}:{place[1]}" if place[0] else ""
        return f"last error on stderr: {clean(first)}{clean(where)}"
    lines = [line for line in lines if not _HINT.search(line)]
    errors = [line for line in lines if _ERROR.search(line)]
    if errors:
        return f"last error on stderr: {clean(errors[-1].strip())}"
    return f"last line on stderr: {clean(lines[-1].strip())}" if lines else ""
