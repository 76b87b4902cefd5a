"""Starting ranks and the store: interpreter, environment, command line, pipes."""

import errno
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import time

from gpuboard.agent.launch import CallRefused
from gpuboard.agent.launch import output as relay

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Tuple

# The first code in a worker's interpreter. It is read from a pipe named like /dev/fd/7, so that no file remains and no
# source is on a command line, and reads the rest from the socket: a pipe may hold as little as 4 kB. That name stays in
# the outermost frame, and linecache opens it for every printed stack. The descriptor becomes /dev/null: otherwise it
# could be a file or pipe of the script, which linecache would read empty or block on.
_STUB = """import os as o,json
n=o.open(o.devnull,0)
o.dup2(n,%(script)d,False)
o.close(n)
def r(n):
 d=b""
 while len(d)<n:
  c=o.read(%(channel)d,n-len(d))
  if not c:o._exit(1)
  d+=c
 return d
p=json.loads(r(int(r(8),16)).decode())
d={}
for n,s in p["modules"]:
 m=type(o)(n)
 m.__dict__.update(d)
 exec(compile(s,"<gpuboard>","exec"),m.__dict__)
 d[n]=m
m.main(globals(),d["worker_channel"].WorkerChannel(%(channel)d,p["config"]),p["config"])
"""

# in the order in which they need another
_WORKER_MODULES = ("traceback_text", "exception", "module_search", "preimport", "torch_hooks", "recorder")

# Variables that gpuboard sets for each rank: values from the caller's environment are stale.
_SET_PER_RANK = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip


class Worker:
    """A worker or the store: its process, its output and its socket."""

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", link: socket.socket) -> None:
        self.rank = rank  # -1: the store
        self.stdin_fd = -1  # the writing end, for the rank that gets input
        if process.stdin is not None:
            self.stdin_fd = os.dup(process.stdin.fileno())
            process.stdin.close()
        self.process = process
        self.pid = process.pid
        self.link = link
        self.started = time.monotonic()
        self.status: "Optional[int]" = None  # exit code, or minus the signal's number
        self.joined = False
        self.all_ranks = True  # no process group of fewer is known
        self.at_gate = False  # it has imported torch
        self.reports = False  # it is to send how its script ends
        assert process.stdout is not None and process.stderr is not None
        self.streams = [
            relay.Stream(os.dup(process.stdout.fileno()), rank, "out"),
            relay.Stream(os.dup(process.stderr.fileno()), rank, "err"),
        ]
        process.stdout.close()
        process.stderr.close()
        for stream in self.streams:
            os.set_blocking(stream.fd, False)
        link.setblocking(False)
        self._in = b""
        self._out = b""

    def ended(self, status: int) -> None:
        """Record the status from waitpid, which the supervisor calls for all children."""
        self.status = status
        self.process.returncode = status  # subprocess then neither waits nor warns

    @property
    def pending(self) -> bool:
        """Whether data for the child is still to be written."""
        return bool(self._out)

    def send(self, message: "Dict[str, Any]") -> None:
        """Queue a message for the child."""
        self._queue(json.dumps(message).encode("ascii") + b"\n")

    def _queue(self, data: bytes) -> None:
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes without blocking."""
        while self._out:
            try:
                self._out = self._out[self.link.send(self._out) :]
            except BlockingIOError:
                return
            except OSError:
                self._out = b""  # the child has ended, which waitpid reports

    def receive(self) -> "Tuple[List[Dict[str, Any]], bool]":
        """Return the complete messages so far, and whether the child has closed its side."""
        closed = False
        while True:
            try:
                data = self.link.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                closed = True
                break
            self._in += data
        lines = self._in.split(b"\n")
        self._in = lines.pop()
        found = []
        for line in lines:
            try:
                found.append(json.loads(line.decode("ascii")))
            except ValueError:
                continue  # the script has written into this descriptor
        return [message for message in found if isinstance(message, dict)], closed


def interpreter(python: "Optional[str]", environ: "Dict[str, str]", wrapped: bool) -> str:
    """Return the training interpreter: ``python``, else that of the environment, else that of PATH.

    Paths inside a container (``wrapped``) cannot be checked: ``python``, else ``python3``. Raises CallRefused.
    """
    if wrapped:
        return python or "python3"
    if python:
        found = shutil.which(python, path=environ.get("PATH"))
        if found is None:
            raise CallRefused("python", "no interpreter %s on this node; pass --python PATH" % python)
        return found
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = os.path.join(environ.get(variable, ""), "bin", "python")
        if environ.get(variable) and os.access(candidate, os.X_OK):
            return candidate
    for name in ("python3", "python"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found is not None:
            return found
    raise CallRefused("python", "no python3 or python on PATH (%s); pass --python PATH" % environ.get("PATH", ""))


def node_environ(config: "Dict[str, Any]") -> "Dict[str, str]":
    """Return the environment that all ranks of the node share: the node's own, the sent variables, those of launch."""
    environ = dict(os.environ)
    environ.update(config["environ"])
    ranks = config["ranks"]
    if "OMP_NUM_THREADS" not in environ:
        cores = len(os.sched_getaffinity(0))
        environ["OMP_NUM_THREADS"] = str(max(1, cores // max(1, len(ranks))))
    environ.update(
        {
            "WORLD_SIZE": str(config["world_size"]),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GROUP_RANK": str(config["node_rank"]),
            "NODE_RANK": str(config["node_rank"]),
            "GROUP_WORLD_SIZE": str(config["nodes"]),
            "ROLE_WORLD_SIZE": str(config["world_size"]),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": config["run"],
            "TORCHELASTIC_RESTART_COUNT": str(config["attempt"] - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(config["max_restarts"]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "PYTHONUNBUFFERED": "1",
            "PWD": config["cwd"],
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": config["cuda_visible_devices"],
            "GPUBOARD_RUN": config["run"],
            "GPUBOARD_ATTEMPT": str(config["attempt"]),
        }
    )
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environ.pop("GPUBOARD_LEASE", None)
    if config["lease"]:
        environ["GPUBOARD_LEASE"] = config["lease"]
    return environ


def rank_environ(shared: "Dict[str, str]", rank: "Dict[str, Any]", master_addr: str) -> "Dict[str, str]":
    """Return the environment of one rank. The gate sets MASTER_PORT, and MASTER_ADDR again."""
    number = str(rank["rank"])
    environ = dict(shared)
    environ.pop("MASTER_PORT", None)
    environ.update({"RANK": number, "LOCAL_RANK": str(rank["local_rank"]), "ROLE_RANK": number})
    environ["MASTER_ADDR"] = master_addr
    return environ


def stale(environ: "Dict[str, str]") -> "List[str]":
    """Return the assignments in ``environ`` that launch replaces for each rank."""
    return ["%s=%s" % (name, environ[name]) for name in _SET_PER_RANK if name in environ]


def command(config: "Dict[str, Any]", environ: "Dict[str, str]", after_python: "List[str]") -> "List[str]":
    """Return the command line: wrapper, training interpreter, its arguments. Raises CallRefused."""
    wrap, python = list(config["wrap"]), config["python"]
    if python and "/" in python and not wrap:  # relative to the user's folder, not to the one that sshd starts in
        python = os.path.join(config["cwd"], os.path.expanduser(python))
    return [*wrap, interpreter(python, environ, bool(wrap)), *after_python]


def program(config: "Dict[str, Any]", environ: "Dict[str, str]") -> str:
    """Return the file of a target that is a program: a path, or one of PATH, or of the folder. Raises CallRefused."""
    name = str(config["target"]["name"])
    if config["wrap"]:  # paths inside a container cannot be checked
        return name
    found = None if "/" in name else shutil.which(name, path=environ.get("PATH"))
    path = found or os.path.join(config["cwd"], os.path.expanduser(name))
    if not os.path.isfile(path):
        raise CallRefused("target", "no program %s in %s or on PATH of this node" % (name, config["cwd"]))
    if not os.access(path, os.X_OK):
        raise CallRefused("program", "%s is not executable; chmod +x it, or leave out --no-python for a script" % path)
    missing = _missing_interpreter(path)
    if missing:
        text = "%s begins with #!%s, which does not exist on this node; correct that line, or install the interpreter"
        raise CallRefused("program", text % (path, missing))
    return path


def _missing_interpreter(path: str) -> str:
    """Return the interpreter that a program's first line names if it does not exist, else ""."""
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:  # it may be executable without being readable
        return ""
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    return words[0] if words and words[0].startswith("/") and not os.path.exists(words[0]) else ""


def start_program(config: "Dict[str, Any]", environ: "Dict[str, str]", rank: int) -> Worker:
    """Start a rank that is a program, without a channel. Raises CallRefused."""
    line = [*config["wrap"], program(config, environ), *config["target"]["args"]]
    ours, theirs = socket.socketpair()
    theirs.close()
    return Worker(rank, _popen(config, environ, line, "target", rank), ours)


def _popen(
    config: "Dict[str, Any]",
    environ: "Dict[str, str]",
    line: "List[str]",
    kind: str,
    rank: int,
    *,
    keep: "Tuple[int, ...]" = (),
) -> "subprocess.Popen[bytes]":
    """Start a process of the run. Raises CallRefused with ``kind`` or ``cwd``."""
    try:
        return subprocess.Popen(
            line,
            stdin=subprocess.PIPE if rank == config["stdin_rank"] else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=config["cwd"],
            env=environ,
            pass_fds=keep,
            start_new_session=True,  # signals of a terminal are for the head, which forwards them
        )
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        kind = "cwd" if not os.path.isdir(config["cwd"]) else "wrap" if config["wrap"] else kind
        raise CallRefused(kind, "cannot start %s in %s: %s" % (line[0], config["cwd"], error)) from error


def start_worker(  # noqa: PLR0917
    config: "Dict[str, Any]",
    environ: "Dict[str, str]",
    rank: int,
    body: str,
    task: "Dict[str, Any]",
    shown: "List[str]",
    *,
    keep: "Tuple[int, ...]" = (),
) -> Worker:
    """Start a new training interpreter that runs module ``body`` ("worker" or "store") with ``task`` as its config.

    ``shown``: arguments that ps shows; ``keep``: descriptors to inherit. To be called in the main thread only: a
    child's death signal fires when the thread that started it ends. Raises CallRefused.
    """
    script, script_end = os.pipe()
    ours, theirs = socket.socketpair()
    try:
        os.write(script_end, (_STUB % {"script": script, "channel": theirs.fileno()}).encode("ascii"))
        os.close(script_end)
        line = command(config, environ, ["/dev/fd/%d" % script, *shown])
        process = _popen(config, environ, line, "python", rank, keep=(script, theirs.fileno(), *keep))
    except BaseException:
        ours.close()
        raise
    finally:
        os.close(script)
        theirs.close()
    child = Worker(rank, process, ours)
    task = dict(task, supervisor=os.getpid(), wrapped=bool(config["wrap"]))
    builtin = ["links"] if task.get("kind") == "builtin" else []
    modules = ["worker_channel", *(_WORKER_MODULES if body == "worker" else ()), *builtin, body]
    payload = json.dumps(
        {
            # Each one finds those before it under their names.
            "modules": [[name, module_source("gpuboard.agent.launch.rank." + name)] for name in modules],
            "config": task,
        }
    ).encode("ascii")
    child._queue(b"%08x" % len(payload) + payload)
    return child


def module_source(name: str) -> str:
    """Return the source text of a module, to run it under another interpreter. Raises ImportError and OSError."""
    spec = importlib.util.find_spec(name)
    try:
        text = spec.loader.get_source(name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    except ImportError as error:
        if isinstance(error.__cause__, OSError):  # such as too many open files
            raise error.__cause__ from None
        raise
    if text is None:
        raise ImportError("no source of %s here" % name, name=name)
    return str(text)
