"""What a rank is doing, in words (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpuboard.launch.stalls.evidence import ChildProcess, RankEvidence, connects, dataset_frame, own_frame
from gpuboard.launch.stalls.waits import HANDLE_WAIT, Activity, ranks_label
from gpuboard.model.text import clean
from gpuboard.model.units import format_duration

NAMED = 3  # ranks, or places, that a sentence describes one by one
_LITTLE = 0.01  # of a core: of an active rank whose use of the CPU is not known
# Modules, and calls in the user's own code, that wait for a child process
_CHILD = ("/subprocess.py", "/multiprocessing/popen_fork.py", "/multiprocessing/connection.py")
# Modules that wait for other threads: join(), a queue, a future, asyncio's loop
_THREADS = ("/threading.py", "/selectors.py")
_WAITPID = re.compile(r"\bos\.wait(pid|id|3|4)?\(")
_WARNING = re.compile(r"(^|\]:)\[?[IW]\d{4} |Warning\b")  # of torch's C++ code and its Python code, of Python


def seconds(length: float) -> str:
    """Return a waiting time as text: ``12 s``, ``3m20s`` from two minutes on."""
    return f"{round(length)} s" if length < 120 else format_duration(round(length))


def exit_place(places: Sequence[str]) -> str:
    """Return where ranks called sys.exit(), as a clause; "" where one did not or they differ."""
    return f"; sys.exit() was called at {places[0]}" if len({*places}) == 1 and places[0] else ""


def describe(one: Activity) -> str:
    """Return what a rank does, and where."""
    if one.doing == "ended":
        return "ended" if one.status.exit_code is None else f"ended with exit code {one.status.exit_code}"
    words = {
        "stopped": "stopped",
        "blocked": "in uninterruptible sleep",
        "importing": f"still runs {other_program(one)}" if other_program(one) else "still importing torch",
        "init": f"waits in {one.call or 'init_process_group'}",
        "collective": f"waits in {collective(one)}",
        "data": "waits for its DataLoader",
        "code": "running" if one.status.quiet_s is None else _idle(one),
        "unknown": "state unknown",
    }[one.doing]
    below = f" in its process {one.process.pid}" if one.process is not None else ""
    return f"{words}{below}{at_place(one)}{_worker(one) if one.doing == 'data' else ''}"


def _idle(one: Activity) -> str:
    if one.evidence is not None and connects(one.evidence.stack, one.evidence.source):
        return "waits for a connection to be opened"
    if (child := _awaited(one)) is not None:
        return f"waits for its process {child.pid} ({clean(child.name, 40)}){_child_at(child)}, started"
    at_exit = one.frame is not None and one.frame.function == "_shutdown" and one.frame.file.endswith("threading.py")
    return "its script has ended, and it waits for its other threads" if at_exit else "idle"


def of_several(words: str) -> str:
    """Return words for one rank as words for several: ``waits for its DataLoader``, ``wait for their DataLoader``."""
    return "wait " + words[6:].replace("for its ", "for their ", 1) if words.startswith("waits ") else words


def at_place(one: Activity) -> str:
    """Return `` at train.py:41 in step``, "" if its place is unknown."""
    return f" at {one.place}" if one.place else ""


def collective(one: Activity) -> str:
    """Return in which collective or transfer a rank waits."""
    now = one.current
    if one.peer is not None:
        return f"{one.call} {'from' if one.call == 'recv' else 'to'} rank {one.peer}"
    if one.call == HANDLE_WAIT and one.evidence is not None and one.evidence.source:
        return f"`{clean(one.evidence.source, 80)}`"
    if one.group is None or now is None:
        return one.call or "a collective"
    group = "" if one.group.name == "0" else f" of group {clean(one.group.name, 40)}"
    inside = f" in {one.call}" if one.call and now.op.strip("_") not in one.call else ""
    return f"{now.op}{inside} (collective {now.seq}{group})"


def waiting(waits: Mapping[int, frozenset[int]], activities: Mapping[int, Activity]) -> str:
    """Return ``; ranks 0,2-3 wait in all_reduce (collective 12) at train.py:55``, and so for each such place."""
    ones = [activities[rank] for rank in sorted(waits)]
    if not ones:
        return ""
    doing: dict[str, list[Activity]] = {}
    for one in ones:
        doing.setdefault(describe(one), []).append(one)
    parts = [f"; {ranks_label(same)} {words if len(same) == 1 else of_several(words)}" for words, same in doing.items()]
    more = f"; {len(parts) - NAMED} more places" if len(parts) > NAMED else ""
    return "".join(parts[:NAMED]) + more


def cpu(one: Activity) -> float:
    """Return the share of a core that a rank uses, 0 for one that is quiet."""
    if one.status.quiet_s is not None:
        return 0.0
    return max(_LITTLE, (one.evidence.cpu if one.evidence else None) or 0.0)


def is_at(one: Activity, absent: bool) -> str:
    """Return what a rank that others wait for is doing, after "which"."""
    place = f" at {one.place}" if one.place else " at an unknown place"
    before = "has not called init_process_group: it " if absent else ""
    if one.doing == "importing":
        other = other_program(one)
        return f"has not started Python: its process still runs {other}" if other else "is still importing torch"
    if one.doing == "data":
        return f"{before}waits for its DataLoader{place}{_worker(one)}"
    if one.doing == "unknown":
        return f"{before}cannot be inspected"
    evidence = one.evidence
    if evidence is not None and "find python" in (evidence.stack_error or "") and (other := other_program(one)):
        return f"{before}has replaced its Python by {other}"
    how = ""
    if evidence is not None and cpu(one) and (evidence.cpu or 0.0) >= _LITTLE:
        how = f" ({round(100 * cpu(one))} % of a core{', holding the GIL' if evidence.gil else ''})"
    if (child := _awaited(one)) is not None:
        how = f", waiting for its process {child.pid} ({clean(child.name, 40)}){_child_at(child)}{how}"
    if one.doing == "code" and evidence is not None:
        how += clause(one) + _threads(evidence)
    last = clean(one.status.last_error, 200)
    quoted = f"; its last line on stderr: {last}" if last and not is_warning(last) else ""
    return f"{before}is{place}{how}{quoted}"


def clause(one: Activity) -> str:
    """Return in which clause a rank is that may follow an exception, "" if in none."""
    found = one.evidence.clause if one.evidence is not None else ""
    return f", in the {clean(found, 120)} (an exception would be printed after it)" if found else ""


def _threads(evidence: RankEvidence) -> str:
    """Return where the other threads of a rank are, or why there is none, if its main thread waits for one of them or
    for a task of asyncio."""
    if not evidence.stack or not evidence.stack[0].file.endswith(_THREADS):
        return ""
    if evidence.stack[0].file.endswith("/selectors.py") and any("/asyncio/" in one.file for one in evidence.stack):
        return "; no task of its asyncio loop can go on: has one ended with an exception that is not awaited?"
    places = [(clean(one.name, 40), own_frame(one.stack)) for one in evidence.threads]
    words = [f"; its thread {name} is at {frame.place}" for name, frame in places if frame is not None]
    return "".join(words[:NAMED])


def process_place(child: ChildProcess) -> str:
    """Return `` at train.py:41 in step``, "" if its place is unknown."""
    frame = own_frame(child.stack)
    return f" at {frame.place}" if frame is not None else ""


def _awaited(one: Activity) -> ChildProcess | None:
    """Return the process for which a rank waits."""
    evidence = one.evidence
    if evidence is None or not evidence.stack or not evidence.children:
        return None
    waits = evidence.stack[0].file.endswith(_CHILD) or _WAITPID.search(evidence.source)
    return next((c for c in evidence.children if c.stack), evidence.children[0]) if waits else None


def _child_at(child: ChildProcess) -> str:
    does = " waits for a connection to be opened" if connects(child.stack, child.source) else " is"
    return f", which{does}{place}" if (place := process_place(child)) else ""


def is_warning(line: str) -> bool:
    """Whether a line on stderr is a warning of torch or Python."""
    return bool(_WARNING.search(line))


def other_program(one: Activity) -> str:
    """Return the program that a rank runs in place of Python (--wrap), "" if it is Python or unknown."""
    evidence = one.evidence
    if evidence is None or evidence.stack or "python" in evidence.name:
        return ""
    return clean(evidence.name, 40)


def _worker(one: Activity) -> str:
    """Return where the DataLoader workers of a rank are."""
    children = one.evidence.children if one.evidence else []
    for child in children:
        if child.state in {"T", "t"}:
            return f", whose worker {child.pid} is stopped"
        if (frame := dataset_frame(child.stack)) is not None:
            return f", whose worker {child.pid} is at {frame.place}"
    return ""


def lock(one: Activity, activities: Mapping[int, Activity]) -> tuple[str, str]:
    """Return for which file lock a rank waits and who holds it, and the remedy; "" without one."""
    held = one.evidence.lock if one.evidence is not None and one.doing == "code" else None
    if held is None:
        return "", ""
    file = clean(held.file, 160)
    words = f"it waits for the lock on {file or 'a file'}, held" if held.waits else f"{file} is locked"
    for other in activities.values():
        if other.evidence is not None and (other.status.node, other.evidence.pid) == (one.status.node, held.pid):
            return f"; {words} by {other.status.label}", "release the lock before waiting for other ranks"
    program = f" ({clean(held.name, 40)})" if held.name else ", which has ended"
    holder = f"process {held.pid}{program}" if held.pid else "a process that cannot be seen"
    return f"; {words} by {holder}", f"see what has the lock: fuser -v {file or 'FILE'}"
