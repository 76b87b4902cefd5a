"""Starting ranks and the store: interpreter, environment, command line, pipes."""

import json
import os
import shutil
import socket
import subprocess
import time

from gpuboard.agent import module_source
from gpuboard.agent.launch import CallRefused
from gpuboard.agent.launch import output as relay

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Tuple

# What runs first in a worker's interpreter. It is read from a pipe under a name like /dev/fd/7 (so no file is left
# behind and no source on a command line), and fetches the rest over the socket: a pipe may hold as little as 4 kB.
# That name stays at the bottom of every stack, and whoever shows a stack opens it (linecache): /dev/null is kept there,
# else it would be any file or pipe of the script, read empty or waited for without end.
_STUB = """import os as o,json
n=o.open(o.devnull,0)
o.dup2(n,%(script)d,False)
o.close(n)
def r(n):
 d=b""
 while len(d)<n:
  c=o.read(%(bond)d,n-len(d))
  if not c:o._exit(1)
  d+=c
 return d
p=json.loads(r(int(r(8),16)).decode())
b=type(o)("bond")
exec(compile(p["bond"],"<gpuboard>","exec"),b.__dict__)
m=type(o)("body")
exec(compile(p["body"],"<gpuboard>","exec"),m.__dict__)
m.main(globals(),b.Bond(%(bond)d,p["config"]),p["config"])
"""

# Set for every rank by us: a value the caller's environment had is stale.
_OURS_ALWAYS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip


class Worker:
    """A worker or the store: its process, its output and its socket."""

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", link: socket.socket) -> None:
        self.rank = rank  # -1: the store
        self.process = process
        self.pid = process.pid
        self.link = link
        self.started = time.monotonic()
        self.status: "Optional[int]" = None  # as waitpid gives it
        self.joined = False
        self.at_gate = False  # it has imported torch
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
        """Take the status that waitpid gave: the supervisor waits for everything itself."""
        self.status = status
        self.process.returncode = status  # so that subprocess neither waits nor warns

    @property
    def pending(self) -> bool:
        """Whether something said to the child is still to be written."""
        return bool(self._out)

    def tell(self, message: "Dict[str, Any]") -> None:
        """Queue a line for the child."""
        self._send(json.dumps(message).encode("ascii") + b"\n")

    def _send(self, data: bytes) -> None:
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Write what the child takes now."""
        while self._out:
            try:
                self._out = self._out[self.link.send(self._out) :]
            except BlockingIOError:
                return
            except OSError:
                self._out = b""  # it is gone; its end is told elsewhere

    def heard(self) -> "Tuple[List[Dict[str, Any]], bool]":
        """Return the messages that have arrived whole, and whether the child has closed its side."""
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
                continue  # the script found our descriptor and wrote into it: its loss only
        return [message for message in found if isinstance(message, dict)], closed


def interpreter(python: "Optional[str]", environ: "Dict[str, str]", wrapped: bool) -> str:
    """Return the training interpreter: the one asked for, else that of the environment, else PATH's.

    Inside a container (``wrapped``) paths cannot be looked at: only what was asked for counts, else ``python3``.
    Raises CallRefused.
    """
    if wrapped:
        return python or "python3"
    if python:
        found = shutil.which(python, path=environ.get("PATH"))
        if found is None:
            raise CallRefused("python", "there is no interpreter %s on this node; --python names another" % python)
        return found
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = os.path.join(environ.get(variable, ""), "bin", "python")
        if environ.get(variable) and os.access(candidate, os.X_OK):
            return candidate
    for name in ("python3", "python"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found is not None:
            return found
    raise CallRefused("python", "no python3 or python on PATH (%s); --python names one" % environ.get("PATH", ""))


def node_environ(config: "Dict[str, Any]") -> "Dict[str, str]":
    """Return this node's environment with the sent variables on top and what all ranks of the node share."""
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
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PYTHONUNBUFFERED": "1",
            "PWD": config["cwd"],
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": config["cuda_visible_devices"],
            "GPUBOARD_RUN": config["run"],
        }
    )
    environ.pop("GPUBOARD_LEASE", None)
    if config["lease"]:
        environ["GPUBOARD_LEASE"] = config["lease"]
    return environ


def rank_environ(shared: "Dict[str, str]", rank: "Dict[str, Any]", master_addr: str) -> "Dict[str, str]":
    """Return the environment of one rank. MASTER_PORT follows at the gate, MASTER_ADDR again."""
    number = str(rank["rank"])
    environ = dict(shared)
    environ.pop("MASTER_PORT", None)
    environ.update({"RANK": number, "LOCAL_RANK": str(rank["local_rank"]), "ROLE_RANK": number})
    environ["MASTER_ADDR"] = master_addr
    return environ


def stale(environ: "Dict[str, str]") -> "List[str]":
    """Return the assignments of the caller's or the node's environment that every rank gets anew."""
    return ["%s=%s" % (name, environ[name]) for name in _OURS_ALWAYS if name in environ]


def command(config: "Dict[str, Any]", environ: "Dict[str, str]", after_python: "List[str]") -> "List[str]":
    """Return wrapper, training interpreter and what follows it. Raises CallRefused."""
    wrap, python = list(config["wrap"]), config["python"]
    if python and "/" in python and not wrap:  # as the person means it, not below the folder that sshd starts in
        python = os.path.join(config["cwd"], os.path.expanduser(python))
    return [*wrap, interpreter(python, environ, bool(wrap)), *after_python]


def start(  # noqa: PLR0917
    config: "Dict[str, Any]",
    environ: "Dict[str, str]",
    rank: int,
    body: str,
    task: "Dict[str, Any]",
    shown: "List[str]",
    *,
    keep: "Tuple[int, ...]" = (),
) -> Worker:
    """Start a fresh training interpreter on ``body`` ("worker" or "store") with ``task`` as its config.

    ``shown`` is what ps shows behind the interpreter's name; ``keep`` are descriptors it inherits. To be called from
    the main thread only: a child's death signal fires when the thread that made it ends. Raises CallRefused.
    """
    script, script_end = os.pipe()
    ours, theirs = socket.socketpair()
    try:
        os.write(script_end, (_STUB % {"script": script, "bond": theirs.fileno()}).encode("ascii"))
        os.close(script_end)
        try:
            process = subprocess.Popen(
                command(config, environ, ["/dev/fd/%d" % script, *shown]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=config["cwd"],
                env=environ,
                pass_fds=(script, theirs.fileno(), *keep),
                start_new_session=True,  # a terminal's signals reach the head alone, which passes them on
            )
        except OSError as error:
            ours.close()
            kind = "cwd" if not os.path.isdir(config["cwd"]) else "python"
            raise CallRefused(kind, "cannot start %s in %s: %s" % (body, config["cwd"], error)) from error
    finally:
        os.close(script)
        theirs.close()
    child = Worker(rank, process, ours)
    task = dict(task, supervisor=os.getpid(), wrapped=bool(config["wrap"]))
    payload = json.dumps(
        {
            "bond": module_source.source("gpuboard.agent.launch.worker_channel"),
            "body": module_source.source("gpuboard.agent.launch." + body),
            "config": task,
        }
    ).encode("ascii")
    child._send(b"%08x" % len(payload) + payload)
    return child
