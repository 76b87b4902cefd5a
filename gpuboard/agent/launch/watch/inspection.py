"""A closer inspection of ranks: process states, Python stacks by py-spy, the collectives of torch's flight recorder."""

import ast
import base64
import json
import linecache
import os
import re
import shutil
import socket
import subprocess
import time
import zlib

from gpuboard.agent import proc
from gpuboard.agent.launch import teardown
from gpuboard.agent.launch.rank import recorder
from gpuboard.agent.launch.rank.traceback_text import is_library, within
from gpuboard.agent.launch.watch import locks
from gpuboard.agent.launch.watch.signs import load

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Tuple

_STACK_S = 3.0  # of py-spy: 0.1 s as a rule, more on a busy node
_ANSWER_S = 1.0  # of all ranks' worker servers, whose threads need no GIL for the flight recorder
_FRAMES = 64  # of a stack: the innermost ones
_CHILDREN = 8  # of a rank whose stacks are read, for example DataLoader workers
_THREADS = 8  # of a rank, besides its main thread, in which the user's own code runs
_CHANGING = 8  # innermost frames whose variables show whether a rank makes progress
_RECENT = 8  # collectives of each process group that are reported
_SOURCE = 200  # characters of a line of the user's code
_NUMBER = re.compile(r"[0-9]{1,9}$")
_C10D = "torch/distributed/distributed_c10d.py"
# Functions of that module that exchange data with one rank → the variables with its number: of all ranks in a transfer,
# of the process group in a collective
_PEERS = {
    "recv": ("src",),
    "send": ("dst",),
    "broadcast": ("group_src", "src"),
    "scatter": ("group_src", "src"),
    "gather": ("group_dst", "dst"),
    "reduce": ("group_dst", "dst"),
}
# Handlers of torch's worker server that return the flight recorder: gloo's, and NCCL's where torch has NCCL
_RECORDERS = ("fr_trace_json", "dump_nccl_trace_json")
_RESPONSE = 8 * 1024 * 1024  # bytes: the flight recorder keeps 2,000 entries of about 500 bytes


def pyspy(path: "Optional[str]", data: "Optional[str]") -> "Optional[str]":
    """Return the path of a py-spy that can be executed: ``path``, else that of PATH, else one made from ``data``.

    ``data`` (zlib, base64) is kept in memory, so that no file remains on the node (memfd_create, Python 3.8).
    """
    if path and os.access(path, os.X_OK):
        return path
    if not data or not hasattr(os, "memfd_create"):
        return shutil.which("py-spy")
    fd = os.memfd_create("py-spy")  # novm: tested above
    program = zlib.decompress(base64.b64decode(data))
    while program:
        program = program[os.write(fd, program) :]
    return "/proc/%d/fd/%d" % (os.getpid(), fd)


def inspect(ranks: "List[Tuple[int, int, str]]", pyspy: "Optional[str]") -> "Dict[str, Any]":
    """Return what is found about ``ranks``: docs/launch-protocol.md, call ``inspect``."""
    # First: after a failure the other ranks have a moment only before they end, too.
    until = time.monotonic() + _ANSWER_S
    collectives = {rank: _collectives(pid, path, until) for rank, pid, path in ranks}
    processes = teardown.read_processes()
    held = locks.read()
    found = []
    spies: "Dict[int, Optional[subprocess.Popen[bytes]]]" = {}
    for rank, pid, _ in ranks:
        children = [processes[child] for child in sorted(teardown.descendants(pid, processes))]
        own = processes.get(pid)
        item: "Dict[str, Any]" = {
            "rank": rank,
            "pid": pid,
            "name": own.name if own else "",
            "state": own.state if own else None,
            "wchan": _wchan(pid) if own and own.state == "D" else None,
            "collectives": collectives[rank],
            "lock": locks.awaited(pid, held),
            "children": [{"pid": c.pid, "name": c.name, "state": c.state} for c in children[:_CHILDREN]],
        }
        found.append(item)
        for process in [own, *children[:_CHILDREN]]:
            if process is not None and process.state not in "ZX":
                spies[process.pid] = _spy(pyspy, process.pid, process.state in "tT", locals_too=process is own)
    until = time.monotonic() + _STACK_S
    for item in found:
        item.update(_stack(spies.get(item["pid"]), item["pid"], until))
        for child in item["children"]:
            child.update(_stack(spies.get(child["pid"]), child["pid"], until))
            child["source"] = _source(child["stack"])
        if item.get("stack_error") and item["state"] not in ("t", "T", None) and time.monotonic() < until:
            # Its variables may be what py-spy cannot read.
            plain = _stack(_spy(pyspy, item["pid"], stopped=False, locals_too=False), item["pid"], until)
            item.update(plain, stack_error=plain.get("stack_error"))
        if item.get("stack_error") and proc.ptrace_scope() > 1:  # 1: ranks permit it (rank/worker_channel.py)
            item["stack_error"] = "kernel.yama.ptrace_scope is %d there; 1 permits it" % proc.ptrace_scope()
        item["source"] = _source(item["stack"])
        item["clause"] = _clause(item["stack"])
    return {"ranks": found, "load": load()}


def _wchan(pid: int) -> "Optional[str]":
    """Return the kernel function in which a process sleeps."""
    try:
        return proc.read("/proc/%d/wchan" % pid, 256).decode("ascii", "replace") or None
    except OSError:
        return None


def _spy(pyspy: "Optional[str]", pid: int, stopped: bool, locals_too: bool) -> "Optional[subprocess.Popen[bytes]]":
    if pyspy is None:
        return None
    # A stopped process cannot be attached to; its memory does not change either.
    command = [pyspy, "dump", "--json", "--pid", str(pid)] + (["--nonblocking"] if stopped else [])
    command += ["--locals"] if locals_too else []
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError:
        return None


def _stack(spy: "Optional[subprocess.Popen[bytes]]", pid: int, until: float) -> "Dict[str, Any]":
    """Return ``stack`` of the main thread, ``active``, ``gil``, what its variables show, and the other ``threads`` in
    which the user's own code runs; ``stack_error`` if py-spy failed."""
    if spy is None:
        return {"stack": [], "stack_error": "py-spy cannot be started"}
    try:
        out, err = spy.communicate(timeout=max(0.01, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        spy.kill()
        return {"stack": [], "stack_error": "py-spy did not end within %d s" % _STACK_S}
    try:
        threads = json.loads(out.decode("utf-8"))
    except ValueError:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        return {"stack": [], "stack_error": lines[-1] if lines else "py-spy ended with %d" % spy.returncode}
    if not threads:
        return {"stack": [], "stack_error": "no Python threads"}
    main = next((thread for thread in threads if thread.get("os_thread_id") == pid), threads[0])
    found = {"stack": _frames(main), "active": bool(main.get("active")), "gil": bool(main.get("owns_gil"))}
    others = [
        {"name": thread.get("thread_name") or "", "stack": _frames(thread)}
        for thread in threads
        if thread is not main and not all(is_library(frame["filename"]) for frame in thread["frames"])
    ]
    return dict(found, threads=others[:_THREADS], **_variables(main["frames"]))


def _variables(frames: "List[Dict[str, Any]]") -> "Dict[str, Any]":
    """Return ``variables``, a checksum of the innermost frames' local variables, ``script``, one of the lines and local
    variables of the user's own code, and if they show it ``peer``, the rank with which the innermost call exchanges
    data, or ``joins_as``, the rank and world size of init_process_group."""
    found: "Dict[str, Any]" = {}
    checksum = script = 0
    for at, frame in enumerate(frames[:_FRAMES]):
        values = {local["name"]: str(local["repr"]) for local in frame.get("locals") or []}
        if at < _CHANGING:
            checksum = zlib.crc32(repr(sorted(values.items())).encode("utf-8", "replace"), checksum)
            if not is_library(frame["filename"]):
                own = repr((frame["line"], sorted(values.items())))
                script = zlib.crc32(own.encode("utf-8", "replace"), script)
        known = {name: int(value) for name, value in values.items() if _NUMBER.match(value)}
        if at == 0 and frame["filename"].endswith(_C10D):
            peers = [known[name] for name in _PEERS.get(frame["name"], ()) if name in known]
            found.update({"peer": peers[0]} if peers else {})
        if "torch/distributed/" in frame["filename"] and "rank" in known and "world_size" in known:
            found.setdefault("joins_as", [known["rank"], known["world_size"]])
    return dict(found, variables=checksum, script=script)


def _source(stack: "List[Dict[str, Any]]") -> str:
    """Return the line at which the user's own code waits; "" if it has called other Python code."""
    if not stack or is_library(stack[0]["file"]):
        return ""
    return linecache.getline(stack[0]["file"], stack[0]["line"]).strip()[:_SOURCE]


def _clause(stack: "List[Dict[str, Any]]") -> str:
    """Return ``finally of train.py:23`` if the user's code is in such a clause, which may follow an exception, or in an
    ``except``; "" otherwise."""
    for frame in stack:
        if is_library(frame["file"]):
            continue
        try:
            tree = ast.parse("".join(linecache.getlines(frame["file"])))
        except (SyntaxError, ValueError, RecursionError):
            continue
        line = frame["line"]
        for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.Try)]):  # the innermost first
            words = ["except" for one in node.handlers if within(line, one.body)]
            words += ["finally"] if within(line, node.finalbody) else []
            if words:
                return "%s of %s:%d" % (words[0], os.path.basename(frame["file"])[:_SOURCE], node.lineno)
    return ""


def _frames(thread: "Dict[str, Any]") -> "List[Dict[str, Any]]":
    return [
        {"function": frame["name"], "file": frame["filename"], "line": frame["line"]}
        for frame in thread["frames"][:_FRAMES]
        if not frame["filename"].startswith(("<gpuboard>", "/dev/fd/"))  # of worker.py
    ]


def _collectives(pid: int, path: str, until: float) -> "Optional[List[Dict[str, Any]]]":
    """Return the newest collectives of each process group of a rank; None if its flight recorders have none."""
    try:
        return [group for trace in flight_recorders(pid, path, until) for group in process_groups(trace)] or None
    except (ValueError, KeyError, TypeError):
        return None  # another format of another torch


def flight_recorders(pid: int, path: str, until: float) -> "List[Dict[str, Any]]":
    """Return the traces of a rank's flight recorders, those that can be read before ``until`` (monotonic)."""
    # Only these handlers: dump_traceback waits for the GIL, and at the interpreter's end that aborts the rank.
    own = proc.read_process(pid)
    if own is None or own.state in "tT":
        return []  # a stopped process accepts the connection and never answers
    answers = [_ask(path, handler, until) for handler in _RECORDERS]
    try:
        traces = [json.loads(data.decode("utf-8")) if data is not None else {} for data in answers]
        return recorder.distinct(*traces)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # another format of another torch


def process_groups(trace: "Dict[str, Any]") -> "List[Dict[str, Any]]":
    """Return the process groups in a trace of the flight recorder."""
    found = []
    left_out = recorder.miscounted(trace)
    for entries in recorder.collectives(trace):
        if str(entries[0]["process_group"][0]) in left_out:
            continue
        # Not pg_status: with gloo its numbers count sends and receives too, which differ from rank to rank.
        newest = int(entries[-1]["collective_seq_id"])
        pending = [e["collective_seq_id"] for e in entries if not e["retired"] and e.get("state") != "completed"]
        found.append(
            {
                "name": str(entries[0]["process_group"][0]),
                "enqueued": newest,
                "completed": int(min(pending)) - 1 if pending else newest,
                "recent": [
                    {
                        "seq": int(entry["collective_seq_id"]),
                        "op": str(entry["profiling_name"]).rpartition(":")[2],
                        "sizes": entry["input_sizes"][:4],
                        "dtypes": entry["input_dtypes"][:4],
                    }
                    for entry in entries[-_RECENT:]
                ],
            }
        )
    return found


def _ask(path: str, handler: str, until: float) -> "Optional[bytes]":
    """Return the body of a response of a rank's worker server; None without one."""
    request = "POST /handler/%s HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n" % handler
    data = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(max(0.01, until - time.monotonic()))
            client.connect(path)
            client.sendall(request.encode("ascii"))
            while len(data) < _RESPONSE:
                client.settimeout(max(0.01, until - time.monotonic()))
                more = client.recv(65536)
                if not more:
                    break
                data += more
    except OSError:
        return None
    head, _, body = data.partition(b"\r\n\r\n")
    return body if head.split(b" ", 2)[1:2] == [b"200"] else None
