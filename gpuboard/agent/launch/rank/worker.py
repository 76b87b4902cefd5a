"""A rank: it imports torch (see preimport), waits at the gate, then runs the target as plain ``python`` would.

This source is executed in a new training interpreter (Python 3.8 or later), after the other modules of this folder but
``store``; no other module of gpuboard is there. Scripts and modules run in the real ``__main__``, whose namespace is
passed in.
"""

import atexit
import gc
import importlib
import importlib.machinery
import io
import linecache
import os
import sys
import time
import traceback

MYPY = False
if MYPY:
    from types import TracebackType
    from typing import Any, Dict, List, Optional, Tuple

    from gpuboard.agent.launch.rank import exception, links, preimport, recorder, torch_hooks
    from gpuboard.agent.launch.rank.worker_channel import WorkerChannel

_OUR_FILE = "<gpuboard>"  # file name of the frames of this code
_TEXT = 16384  # characters of a traceback that are sent
_SETTLE_S = 2.0  # longest wait for gloo's threads at the end of a rank
_RENDEZVOUS = ("init_process_group", "rendezvous", "_create_c10d_store")


def main(namespace: "Dict[str, Any]", channel: "WorkerChannel", config: "Dict[str, Any]") -> None:
    """Run one rank. ``namespace`` is that of ``__main__``; exceptions of the target propagate as under python."""
    state: "Dict[str, Any]" = {"importing": False, "joined": False, "all_ranks": False}
    # linecache must not open the file name of the outermost frame, should the script close all descriptors (start.py).
    linecache.cache[sys.argv[0]] = (0, None, [], sys.argv[0])
    channel.follow_forks()
    if not os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])):
        os.environ["TORCHELASTIC_ERROR_FILE"] = ""  # in a container without that folder: @record would fail
    try:
        atexit.register(_wait_for_gloo)  # registered first: called last
        sys.meta_path.insert(0, torch_hooks.StoreWatch(channel, state, config["diagnostics"]))
        import_s = None
        if config["preimport"] and not preimport.changes_import(config["kind"], config["name"]):
            state["importing"] = True
            import_s = _import_torch()
            state["importing"] = False
        channel.send({"t": "gate", "import_s": import_s})
        _pass_gate(channel, config)
        state["store"] = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        state["world_size"] = int(os.environ["WORLD_SIZE"])  # before the script changes it
        if config["kind"] == "script":
            _run_script(namespace, config["name"], config["args"])
        elif config["kind"] == "module":
            _run_module(namespace, config["name"], config["args"])
        elif config["kind"] == "builtin":
            _run_links(channel, config)
        else:
            _run_function(namespace, config)
    except SystemExit as end:
        handled = end.__context__ is not None and not end.__suppress_context__
        if not isinstance(end.code, (int, type(None))) or (end.code not in (None, 0) and handled):
            _report(channel, end, state)  # hydra, click and many a main() handle errors with an exit
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        trace = _strip(end.__traceback__)
        if code == 0:
            channel.send(dict(_calls(state), t="leaving", code=0, place=exception.left_at(trace)))
        else:
            channel.send({"t": "leaving", "code": code & 255, "place": exception.place_of(end, trace)})
        raise
    except BaseException as error:
        _hide_our_frames()
        _report(channel, error, state)
        raise
    # Before torch closes its connections, which other ranks may notice first.
    channel.send(dict(_calls(state), t="leaving", code=0))


def _calls(state: "Dict[str, Any]") -> "Dict[str, Any]":
    """Return the collectives that this rank called with all others: gloo may accept data of another size without an
    error."""
    return recorder.own() if state["all_ranks"] else {}


def _wait_for_gloo() -> None:
    """Delay the interpreter's end until gloo's threads have released the tensors of their last operation.

    They need the GIL for that. Before Python 3.14 a thread that requests it while the interpreter ends is unwound
    through C++ code, which aborts the process (seen with torch 2.13 when cores are scarce). With a
    DistributedDataParallel model destroy_process_group() does not end these threads. A thread is done when it slept
    before and after a time in which the GIL was free, and was not scheduled in between.
    """
    until = time.monotonic() + _SETTLE_S
    before = _gloo_threads()
    while before and time.monotonic() < until:
        time.sleep(0.001)  # releases the GIL
        now = _gloo_threads()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


def _gloo_threads() -> "Dict[str, Tuple[str, List[str]]]":
    """Return, by thread id, state and context-switch counts of the threads that run gloo's operations."""
    found: "Dict[str, Tuple[str, List[str]]]" = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open("/proc/self/task/%s/status" % thread) as file:
                lines = [line.split() for line in file]
        except OSError:
            continue  # it has ended
        if lines[0][1] == "pt_gloo_runloop":
            state = next(words[1] for words in lines if words[0] == "State:")
            found[thread] = (state, [words[1] for words in lines if words[0].endswith("_ctxt_switches:")])
    return found


def _pass_gate(channel: "WorkerChannel", config: "Dict[str, Any]") -> None:
    """Wait for ``go``; apply the variables that it brings."""
    go = channel.receive()
    os.environ.update(go["environ"])
    if config["memory_fraction"] is not None and config["device"] == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(config["memory_fraction"], config["local_rank"])


def _import_torch() -> float:
    """Import torch ahead of the target; return the seconds that it took."""
    started = time.monotonic()
    gc.disable()  # an import leaves no garbage, and collecting takes a seventh of the time
    import torch  # noqa: F401  # 1.3 s: overlaps preflight, which opens the gate

    gc.enable()
    return round(time.monotonic() - started, 3)


def _reset_namespace(namespace: "Dict[str, Any]") -> None:
    """Reset ``__main__`` to what the interpreter itself puts there."""
    builtins = namespace["__builtins__"]
    namespace.clear()
    namespace.update(
        {"__name__": "__main__", "__doc__": None, "__package__": None, "__loader__": None, "__spec__": None}
    )
    if sys.version_info < (3, 14):
        namespace["__annotations__"] = {}
    namespace["__builtins__"] = builtins


def _set_command_line(argv: "List[str]", first_path: str, after_python: "List[str]") -> None:
    sys.argv[:] = argv
    if not getattr(sys.flags, "safe_path", False):  # python -P adds no entry
        sys.path[0] = first_path
    if hasattr(sys, "orig_argv"):
        # novm: tested above
        sys.orig_argv[:] = [sys.orig_argv[0], *after_python]


def _run_script(namespace: "Dict[str, Any]", name: str, args: "List[str]") -> None:
    """Run a script as ``python NAME ARGS`` does."""
    _reset_namespace(namespace)
    # Since 3.9 the interpreter makes the path absolute, without normalising it.
    file = os.path.join(os.getcwd(), name) if sys.version_info >= (3, 9) else name
    if _is_application(name):
        import runpy

        _set_command_line([name, *args], file, [name, *args])
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as python itself does
        return
    _set_command_line([name, *args], os.path.dirname(os.path.realpath(name)), [name, *args])
    namespace["__file__"] = file
    namespace["__cached__"] = None
    namespace["__loader__"] = importlib.machinery.SourceFileLoader("__main__", file)
    with io.open_code(file) as source:  # novm: a rank has torch, so Python 3.8 or later
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, namespace)


def _is_application(name: str) -> bool:
    """Return whether a file is a folder or a zip archive (zipapp, pex), whose ``__main__.py`` python runs."""
    if os.path.isdir(name):
        return True
    with io.open_code(name) as source:  # novm: as above
        if source.read(2) not in (b"PK", b"#!"):
            return False
    import zipfile

    return zipfile.is_zipfile(name)


def _run_module(namespace: "Dict[str, Any]", name: str, args: "List[str]") -> None:
    """Run a module as ``python -m NAME ARGS`` does, in the real ``__main__`` (unlike ``runpy.run_module``)."""
    import runpy

    _reset_namespace(namespace)
    _set_command_line(["-m", *args], os.getcwd(), ["-m", name, *args])
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_function(namespace: "Dict[str, Any]", config: "Dict[str, Any]") -> None:
    """Call ``package.module:function`` inside a process group, which is created and destroyed here."""
    import inspect

    _reset_namespace(namespace)
    name, args = config["name"], config["args"]
    _set_command_line([name, *args], os.getcwd(), [name, *args])
    module_name, _, path = name.partition(":")
    function: "Any" = importlib.import_module(module_name)
    for part in path.split("."):
        function = getattr(function, part)
    distributed = _join(config).distributed  # the function's module may set variables that torch reads
    result = function(*(args if _takes(function, args) else ()))
    if inspect.iscoroutine(result):
        result.close()  # Python would warn that it was never awaited
        raise TypeError("%s is a coroutine function; name a function that calls asyncio.run() with it" % name)
    if distributed.is_initialized():  # unless the function has done it
        distributed.destroy_process_group()


def _takes(function: "Any", args: "List[str]") -> bool:
    """Return whether a function takes the words of the command line as arguments: else it parses ``sys.argv``, like a
    ``main(argv=None)`` with argparse, or one that hydra has wrapped."""
    import inspect

    options = any(word.startswith("-") for word in args)
    try:
        for follow in (True, False):
            bound = inspect.signature(function, follow_wrapped=follow).bind(*args)
            for parameter in (bound.signature.parameters[name] for name in bound.arguments):
                optional = (
                    parameter.default is not inspect.Parameter.empty or parameter.kind is parameter.VAR_POSITIONAL
                )
                if (optional and options) or isinstance(parameter.default, (type(None), list, tuple)):
                    return False
    except (TypeError, ValueError):  # of another number, or it has no signature
        return False
    return True


def _run_links(channel: "WorkerChannel", config: "Dict[str, Any]") -> None:
    """Measure the links between the ranks; the arguments are seconds and the bytes of the largest tensor."""
    torch = _join(config)
    device = torch.device(config["device"], *([config["local_rank"]] if config["device"] == "cuda" else []))
    found = links.Links(torch, device, float(config["args"][0]), int(config["args"][1])).measure()
    if torch.distributed.get_rank() == 0:
        channel.send(dict(found, t="measured"))
    torch.distributed.destroy_process_group()


def _join(config: "Dict[str, Any]") -> "Any":
    import datetime

    import torch
    from torch import distributed

    options: "Dict[str, Any]" = {"timeout": datetime.timedelta(seconds=config["timeout_s"])}
    if config["device"] == "cuda":
        torch.cuda.set_device(config["local_rank"])
        if config["backend"] == "nccl":
            options["device_id"] = torch.device("cuda", config["local_rank"])
    _init_process_group(distributed, config["backend"], options)
    return torch


def _init_process_group(distributed: "Any", backend: str, options: "Dict[str, Any]") -> None:
    """Initialize the process group and wait for every rank: a rank with a quick function would otherwise leave while
    another still connects to it. torch waits for all ranks with this variable since 2.1, and always before."""
    name = "TORCH_DIST_INIT_BARRIER"
    unset = name not in os.environ
    os.environ.setdefault(name, "1")
    distributed.init_process_group(backend, **options)
    if unset:
        del os.environ[name]  # not for process groups that the function creates


def _strip(trace: "Optional[TracebackType]") -> "Optional[TracebackType]":
    while trace is not None and _is_outer_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_outer_frame(filename: str) -> bool:
    return filename == _OUR_FILE or filename.startswith("/dev/fd/") or filename.endswith("importlib/__init__.py")


def _hide_our_frames() -> None:
    """Have uncaught exceptions printed without our frames, also by the script's own hook."""
    hook = sys.excepthook

    def stripped(kind: "Any", error: BaseException, trace: "Optional[TracebackType]") -> "Any":
        error.__traceback__ = _strip(trace)
        return hook(kind, error, error.__traceback__)

    sys.excepthook = stripped


def _initialized() -> bool:
    """Return whether there is a process group, which may be without a store of TCP."""
    distributed: "Any" = sys.modules.get("torch.distributed")
    return bool(getattr(distributed, "is_initialized", bool)())


def _report(channel: "WorkerChannel", error: BaseException, state: "Dict[str, bool]") -> None:
    """Report the exception that is about to end this rank.

    While it waits for a child, a signal handler may raise another one, as torch's does for a DataLoader worker that has
    died: that one then ends the rank, and is reported with the place of the first.
    """
    trace = error.__traceback__
    try:
        exception.await_child(error)
    except Exception as second:
        _send_report(channel, second, trace, state)
        error.__traceback__ = _strip(trace)  # it is printed, too
        raise second.with_traceback(trace)
    _send_report(channel, error, trace, state)


def _send_report(
    channel: "WorkerChannel", error: BaseException, trace: "Optional[TracebackType]", state: "Dict[str, bool]"
) -> None:
    trace = _strip(trace)
    frames = traceback.extract_tb(trace)
    if state["importing"]:
        phase = "torch"
    elif any(frame.name in _RENDEZVOUS and "distributed" in frame.filename for frame in frames):
        phase = "init"
    else:
        phase = "train" if state["joined"] or _initialized() else "import"
    try:
        described = exception.describe(error, trace)
    except Exception:  # of the exception's own code, or of a signal handler: it must not replace the exception
        described = {"type": exception.type_name(error)}
    # Of torch, which raises them where ranks called different collectives, and where the connection was lost by that.
    called = recorder.own() if state["joined"] and isinstance(error, RuntimeError) else {}
    channel.send(
        dict(
            described,
            **called,
            t="raised",
            traceback=_printed(error, trace)[-_TEXT:],
            phase=phase,
        )
    )


def _printed(error: BaseException, trace: "Optional[TracebackType]") -> str:
    """Return the traceback as Python prints it, "" where the exception's own code fails."""
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception:
        return ""
