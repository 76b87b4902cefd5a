"""Which exception ended a rank: the innermost cause, and what it was raised again as.

This source is executed in the rank, after ``traceback_text``.
"""

import ast
import linecache
import os
import re
import signal
import sys
import time
import traceback

MYPY = False
if MYPY:
    from types import FrameType, TracebackType
    from typing import Any, Dict, List, Optional, Pattern, Sequence, Tuple

    from gpuboard.agent.launch.rank import traceback_text
    from gpuboard.agent.launch.rank.traceback_text import Place

_TEXT = 16384  # characters of a message
_BRIEF = 160  # characters of an exception that is named beside the cause
_NOTES = 3  # of the exception itself, that are named
_CHAIN = 16  # exceptions of a chain that are looked at
_NAMED = 3  # of them beside the cause, that are named
_CHILD_ENDS_S = 1.0  # from a connection that a process has lost, while it ends, until its parent can see how it ended
_TRY = "_try_get_data"  # of torch's DataLoader
# Frames of connections to processes of the rank itself, and of what loads its data
_OWN_CONNECTIONS = re.compile(r"/multiprocessing/(resource_sharer|queues|pool)\.py$|/torch/utils/data/")
_NO_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_SHOWN = 8  # names
# The module in the message of an AttributeError or ImportError
_MODULE = re.compile(
    r"module '(\w+)[\w.]*' has no attribute|cannot import name .* from .*?'(\w+)[\w.]*'|No module named '(\w+)\."
)
# How torch names the process whose traceback it puts into a message
_CHILDREN = (
    (re.compile(r"Caught \S+ (in .+?)\.\nOriginal Traceback"), "%s"),
    (re.compile(r"-- Process (\d+) terminated with the following error:"), "in process %s of torch.multiprocessing"),
)


def describe(error: BaseException, trace: "Optional[TracebackType]") -> "Dict[str, Any]":
    """Return type, message, file, line and function of the cause of ``error``, and a ``note`` about the others.

    ``own_connection``: a connection was lost, and not one to another rank. ``origin``: the rank that failed, of an
    exception that every rank gets. ``chain``: types and messages of all exceptions, suppressed ones too. ``first``: the
    exception that was about to end the rank when the code that is executed nevertheless raised another one.
    """
    chain = _chain(error)
    at = 0
    while at + 1 < len(chain) and _is_wrapper(chain[at][0], chain[at + 1][0]):
        at += 1
    cause = chain[at][0]
    cause_trace = trace if cause is error else cause.__traceback__
    kind, message, place, notes = _read(cause, cause_trace)
    notes += [str(added).strip().partition("\n")[0][:_BRIEF] for added in _added(cause)[:_NOTES]]
    notes += _shadowing(message) if isinstance(cause, (AttributeError, ImportError)) else []
    if isinstance(cause, (OSError, EOFError)) and _receives_data(cause_trace):
        notes.append(_ended_child() or "the process that sent the data has ended: a DataLoader worker?")
    if "exited unexpectedly" in message and not any("is killed by signal" in _message(one) for one, _ in chain):
        notes += _ended_workers(cause_trace)
    parameters = _without_gradient(message, cause_trace)
    notes += [parameters] if parameters else []
    if isinstance(error, SystemExit) and cause is not error:
        notes.append("handled with sys.exit(%s)%s" % (error.code, _at(_place(error, trace))))
    elif at > 0 and _members(chain[at - 1][0]):
        notes.append("first of %d in %s" % (len(_members(chain[at - 1][0])), _brief(chain[at - 1][0])))
    elif at > 0:
        notes.append("raised again as " + _brief(error))
    below = chain[at + 1 :]
    for other, word in below if len(below) <= _NAMED else below[: _NAMED - 1] + below[-1:]:
        if _brief(other) != _brief(cause):
            notes.append(word + " " + _brief(other) + _at(_place(other, other.__traceback__)))
    file, line, function = place
    if not message and isinstance(cause, KeyboardInterrupt):
        message = "SIGINT, of ctrl-C or another process"
    elif not message and file is not None and line is not None:
        message = linecache.getline(file, line).strip()  # `assert loss < limit`
    return {
        "type": kind,
        "message": message[:_TEXT],
        "file": file,
        "line": line,
        "function": function,
        "note": ", ".join(notes),
        "chain": _texts(_chain(error, suppressed=True)),
        "first": _first(chain[at:], cause_trace),
        "origin": _origin(cause),
        "own_connection": any(
            isinstance(one, (OSError, EOFError))
            and _passes(trace if one is error else one.__traceback__, _OWN_CONNECTIONS)
            for one, _ in chain
        ),
    }


def await_child(error: BaseException) -> None:
    """Wait until the process that sent data to this one has ended, if ``error`` is about its lost connection.

    Meanwhile a signal handler of torch's DataLoader may raise an exception about that process.
    """
    until = time.monotonic() + _CHILD_ENDS_S
    lost = isinstance(error, (OSError, EOFError)) and _receives_data(error.__traceback__)
    while lost and not _ended_child() and time.monotonic() < until:
        time.sleep(0.01)


def _ended_child() -> str:
    """Return which process of multiprocessing has failed and how, "" if none has."""
    for process in list(getattr(sys.modules.get("multiprocessing.process"), "_children", ())):
        try:  # without reaping it: it is torch's
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            continue
        if found is not None and found.si_status != 0:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            return "a process of this rank" + _ended(process.pid, code)
    return ""


def _ended_workers(trace: "Optional[TracebackType]") -> "List[str]":
    """Return how the DataLoader workers ended that torch found dead: it may have reaped them before its handler."""
    found = [f.f_locals.get("failed_workers") for f, _ in traceback.walk_tb(trace) if f.f_code.co_name == _TRY]
    workers = found[-1] if found and isinstance(found[-1], list) else []
    return ["worker" + _ended(worker.pid, worker.exitcode) for worker in workers if worker.exitcode]


def _ended(pid: int, code: int) -> str:
    try:
        how = "ended with exit code %d" % code if code >= 0 else "was killed by " + signal.Signals(-code).name
    except ValueError:  # a realtime signal has no name
        how = "was killed by signal %d" % -code
    return " (pid %d) %s" % (pid, how)


def _chain(error: BaseException, *, suppressed: bool = False) -> "List[Tuple[BaseException, str]]":
    """Return ``error`` and what is below it, outermost first, each with its relation to the one before.

    ``suppressed``: also what a traceback leaves out, because of ``raise … from None``.
    """
    chain = [(error, "")]
    while len(chain) < _CHAIN:
        last = chain[-1][0]
        word, below = "caused by", last.__cause__
        if below is None or type(below).__name__.endswith("RemoteTraceback"):  # text of a pool's process
            hidden = last.__suppress_context__ and not suppressed
            word, below = "while handling", None if hidden else last.__context__
        if _members(last):
            word, below = "caused by", _members(last)[0]
        if below is None or any(below is seen for seen, _ in chain):
            break
        chain.append((below, word))
    return chain


def _is_wrapper(error: BaseException, below: BaseException) -> bool:
    """Return whether ``error`` only passes on ``below``: an exception group, an exit in an ``except`` clause, or an
    exception with which a library (hydra, lightning) replaced one of the user's own code; not the interruption of that
    code by which asyncio ends it at a timeout."""
    if isinstance(error, SystemExit) or _members(error):
        return True
    if not isinstance(below, Exception):
        return False
    return error.__cause__ is below and _raised_in_library(error) and not traceback_text.is_library(_file(below))


def _first(chain: "List[Tuple[BaseException, str]]", trace: "Optional[TracebackType]") -> "Optional[Dict[str, Any]]":
    """Return what is known of the exception that was already ending the rank, None without one."""
    first = 0
    above = list(traceback.walk_tb(trace))
    for at in range(1, len(chain)):
        below, word = chain[at]
        if word == "while handling":
            own = isinstance(below, Exception) and not isinstance(below, StopIteration)
            if not own or not _ends_anyway(above, below.__traceback__):
                break
            if not first or not traceback_text.is_library(_file(below)):  # rather one with a place in the script
                first = at
        above += traceback.walk_tb(below.__traceback__)
    if not first:
        return None
    kind, message, (file, line, function), _ = _read(chain[first][0], chain[first][0].__traceback__)
    return {
        "type": kind,
        "message": message[:_TEXT],
        "file": file,
        "line": line,
        "function": function,
        "chain": _texts(chain[first:]),
    }


def _texts(chain: "List[Tuple[BaseException, str]]") -> str:
    return "\n".join("%s: %s" % (type_name(error), _message(error)) for error, _ in chain)[:_TEXT]


def _ends_anyway(above: "List[Tuple[FrameType, int]]", before: "Optional[TracebackType]") -> bool:
    """Return whether the code that raised an exception is executed while the one ``before`` goes on: in a ``finally``,
    at the end of a ``with``, or in an ``except`` clause that raises one in the end."""
    lines = [line for frame, line in above if before is not None and frame is before.tb_frame]
    if before is None or not lines:
        return False
    try:
        tree = ast.parse("".join(linecache.getlines(before.tb_frame.f_code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    at, line = before.tb_lineno, lines[-1]
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            if node.lineno <= line < node.body[0].lineno and traceback_text.within(at, [node, *node.body]):
                return True
        elif isinstance(node, ast.Try):
            handlers = [one.body for one in node.handlers]
            if traceback_text.within(line, node.finalbody) and any(
                traceback_text.within(at, one) for one in [node.body, node.orelse, *handlers]
            ):
                return True
            if traceback_text.within(at, node.body) and any(
                traceback_text.within(line, e) and isinstance(e[-1], ast.Raise) for e in handlers
            ):
                return True
    return False


def _attribute(error: BaseException, name: str) -> "Any":
    """Return an attribute; None without it, or where the class's own ``__getattr__`` fails."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None


def _members(error: BaseException) -> "Tuple[BaseException, ...]":
    """Return the members of an exception group, also of its backport; none for others."""
    found = _attribute(error, "exceptions")
    return found if isinstance(found, tuple) and all(isinstance(e, BaseException) for e in found) else ()


def _receives_data(trace: "Optional[TracebackType]") -> bool:
    """Return whether a tensor was being taken over from another process, which keeps it until then."""
    return _passes(trace, re.compile(r"/multiprocessing/resource_sharer\.py$"))


def _passes(trace: "Optional[TracebackType]", files: "Pattern[str]") -> bool:
    return any(files.search(frame.filename) for frame in traceback.extract_tb(trace))


def _shadowing(message: str) -> "List[str]":
    """Return a note about the user's own file that is imported in place of a module of Python or torch, if any."""
    match = _MODULE.search(message)
    name = next(filter(None, match.groups())) if match else ""
    own = [os.path.join(sys.path[0], name + ending) for ending in (".py", "/__init__.py")] if name else []
    if name not in (*getattr(sys, "stdlib_module_names", ()), "torch", "numpy"):
        return []
    return ["%s is imported in place of %s: rename it" % (file, name) for file in own if os.path.isfile(file)][:1]


def _added(error: BaseException) -> "Sequence[object]":
    """Return what ``add_note`` has added to an exception."""
    found = _attribute(error, "__notes__")
    return found if isinstance(found, (list, tuple)) else ()


def _raised_in_library(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and traceback_text.is_library(frames[-1].filename)


def _file(error: BaseException) -> str:
    return _place(error, error.__traceback__)[0] or "<none>"


def _read(error: BaseException, trace: "Optional[TracebackType]") -> "Tuple[str, str, Place, List[str]]":
    """Return type, message, place and notes; of the exception in a child process if the text of one is in there."""
    message, place = _message(error), _place(error, trace)
    failed = _of_ranks(error)
    if failed:
        origin = _origin(error)
        below, stack = failed[_rank() if origin is None else origin]
        inside = traceback_text.innermost([(frame.filename, frame.lineno, frame.name) for frame in stack])
        words = "raised again as" if origin is None else "every rank got it as"
        return type_name(below), _message(below), inside, ["%s %s" % (words, type_name(error)) + _at(place)]
    remote = error.__cause__
    if remote is not None and type(remote).__name__.endswith("RemoteTraceback"):
        last = traceback_text.last_traceback(str(remote))
        if last is not None:
            notes = ["in a process of a pool%s" % _at(place, " for"), *_above(str(remote))]
            return type_name(error), message, last[2], notes
    last = traceback_text.last_traceback(message)
    if last is None:
        return type_name(error), message, place, []
    where = "reported by " + type_name(error)
    found = [(match.start(), words % match[1]) for regex, words in _CHILDREN for match in regex.finditer(message)]
    if found:
        where = max(found)[1]  # the innermost
    return last[0], last[1], last[2], [where + _at(place, " for"), *_above(message)]


def _above(text: str) -> "List[str]":
    """Return the exceptions that were raised again in a process below this one, from its traceback."""
    found = traceback_text.above(text)[:_NAMED]
    return [
        "%s %s" % (word, (kind + (": " + message.partition("\n")[0] if message else ""))[:_BRIEF]) + _at(place)
        for word, (kind, message, place) in found
    ]


def _of_ranks(error: BaseException) -> "Dict[int, Any]":
    """Return, by rank, the exceptions with their stacks that torch.distributed.checkpoint raises on every rank.

    Its keys are numbers in the process group that it used; without a group, 0 on each rank by itself.
    """
    found = _attribute(error, "failures")
    if type(error).__name__ != "CheckpointException" or not isinstance(found, dict):
        return {}
    users: "List[Any]" = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    used = next((one for one in users if type(one).__name__ == "_DistWrapper" and one.use_dist), None)
    try:
        if used is None:
            return {_rank(): one for one in found.values()}
        if used.group is None:
            return found
        return {sys.modules["torch.distributed"].get_global_rank(used.group, k): one for k, one in found.items()}
    except Exception:  # the group is gone, or the script has deleted RANK: its own text is the cause
        return {}


def _origin(error: BaseException) -> "Optional[int]":
    """Return the rank that failed, of an exception that every rank gets; None where this rank failed itself."""
    failed = _of_ranks(error)
    return None if not failed or _rank() in failed else min(failed)


def _rank() -> int:
    distributed: "Any" = sys.modules.get("torch.distributed")
    return distributed.get_rank() if getattr(distributed, "is_initialized", bool)() else int(os.environ["RANK"])


def type_name(error: BaseException) -> str:
    """Return the name of an exception's class as a traceback prints it."""
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return "%s.%s" % (kind.__module__, kind.__qualname__)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # from the exception's own __str__
        return "(its message cannot be read: %s)" % type(second).__name__


def _brief(error: BaseException) -> str:
    first = _message(error).strip().partition("\n")[0]
    return (type_name(error) + (": " + first if first else ""))[:_BRIEF]


def _place(error: BaseException, trace: "Optional[TracebackType]") -> "Place":
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno, None
    return traceback_text.innermost([(f.filename, f.lineno, f.name) for f in traceback.extract_tb(trace)])


def place_of(error: BaseException, trace: "Optional[TracebackType]") -> str:
    """Return ``/exp/train.py:41 in main``: where the user's own code raised ``error``; "" if unknown."""
    place = _place(error, trace)
    inside = " in %s" % place[2] if place[2] not in (None, "<module>") else ""
    return "%s:%s%s" % (place[0], place[1], inside) if place[0] is not None else ""


def left_at(trace: "Optional[TracebackType]") -> str:
    """Return the place, as ``place_of`` does, where the user's own code called sys.exit(); "" where a library did.

    click, typer and fire end every run so. Reads no file: the run has succeeded.
    """
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(trace)]
    if frames and "_sitebuiltins" in frames[-1][0]:  # exit() and quit()
        frames.pop()
    if not frames or traceback_text.is_library(frames[-1][0]):
        return ""
    file, line, function = frames[-1]
    return "%s:%s%s" % (file, line, "" if function == "<module>" else " in %s" % function)


def _at(place: "Place", word: str = " at") -> str:
    return "%s %s:%s" % (word, place[0], place[1]) if place[0] is not None else ""


def _without_gradient(message: str, trace: "Optional[TracebackType]") -> str:
    """Return the names of the parameters that a message numbers, as text; "" for other messages and without names.

    torch names them with TORCH_DISTRIBUTED_DEBUG only. The next forward() raises the error, so a frame has the model.
    """
    found = _NO_GRADIENT.search(message)
    names = _names(trace) if found else []
    indices = [int(index) for index in found.group(1).split()] if found else []
    if not indices or max(indices) >= len(names):  # requires_grad has changed since
        return ""
    listed = ", ".join(names[index] for index in indices[:_SHOWN])
    more = len(indices) - _SHOWN
    return "parameters without a gradient: %s%s" % (listed, " and %d more" % more if more > 0 else "")


def _names(trace: "Optional[TracebackType]") -> "List[str]":
    """Return the names of the model's parameters in the order of the reducer's indices."""
    kind: "Any" = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    models: "List[Any]" = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    for model in reversed(models):
        if issubclass(type(model), kind):
            named = model.module.named_parameters()
            return [name for name, one in named if one.requires_grad and name not in model.parameters_to_ignore]
    return []
