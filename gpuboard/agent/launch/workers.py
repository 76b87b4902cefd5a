"""The workers of one node: its ranks and, on the first node, the store; their start, gate, output and end."""

import os
import signal
import time

from gpuboard.agent import proc
from gpuboard.agent.event_loop import IN, OUT, Loop
from gpuboard.agent.launch import CallRefused, evidence, output, scratch, start, teardown
from gpuboard.agent.launch.stdin import Stdin
from gpuboard.agent.launch.watch.signs import Signs

MYPY = False
if MYPY:
    import socket
    from typing import Any, Callable, Collection, Dict, List, Optional

    from gpuboard.agent.launch.output import Stream

    Emit = Callable[[str, Dict[str, Any]], None]

_STORE = -1  # the rank number of the store
_SIGTERM_S = 0.5  # after SIGTERM has ended the store: Slurm and a shutdown send it to the supervisor, too, as the cause
_DRAIN_READS = 64  # limit of reads from the pipe of an ended rank: a pipe holds 1 MiB at most, 16 reads


class WorkerGroup:
    """``emit`` sends an event to the head; ``store_lost`` is called with that of a store that has died."""

    def __init__(
        self,
        loop: Loop,
        emit: "Emit",
        store_lost: "Callable[[Dict[str, Any]], None]",
        config: "Dict[str, Any]",
        environ: "Dict[str, str]",
    ) -> None:
        self._loop = loop
        self._store_lost = store_lost
        self._emit = emit
        self._config = config
        self._environ = environ
        self._ranks: "List[start.Worker]" = []
        self._store: "Optional[start.Worker]" = None
        self._store_only = True  # the store was started on torch's C extension alone
        self._store_ready = False
        self._store_socket: "Optional[socket.socket]" = None
        self.ending = False  # all processes are being killed, so their ends are not reported
        self._gate: "Optional[Dict[str, str]]" = None
        self._stdin: "Optional[Stdin]" = None  # of the rank that gets input
        self._paused = False
        self._flushing = False
        self._killed_for_memory = evidence.KilledForMemory()
        self.signs = Signs(emit)
        self._scratch = scratch.create(config)

    @property
    def store_pid(self) -> "Optional[int]":
        """The store's process, None when there is none."""
        return self._store.pid if self._store is not None else None

    def server_path(self, rank: int) -> str:
        """Return the path of a rank's worker server (worker.py), "" if it has none."""
        return self._in_scratch("rank-%d.sock" % rank)

    def _in_scratch(self, name: str) -> str:
        return os.path.join(self._scratch, name) if self._scratch else ""

    def running(self) -> "List[start.Worker]":
        """Return the ranks that have not ended."""
        return [child for child in self._ranks if child.status is None]

    def all_succeeded(self) -> bool:
        """Whether every rank that has ended exited with 0."""
        return all(child.status in (None, 0) for child in self._ranks)

    def start_ranks(self) -> "Dict[str, int]":
        """Start the workers; they import torch and wait. Programs start at the gate. Returns pids by rank.

        Raises CallRefused.
        """
        config, target = self._config, self._config["target"]
        shown = [*(["-m"] if target["kind"] == "module" else []), target["name"], *target["args"]]
        for rank in config["ranks"]:
            environ = start.rank_environ(self._environ, rank, config["master_addr"])
            environ["TORCHELASTIC_ERROR_FILE"] = self._in_scratch("error-%d.json" % rank["rank"])
            if target["kind"] == "program":
                environ.update(self._gate or {})
                self._started(start.start_program(config, environ, rank["rank"]))
                self._emit("gate", {"rank": rank["rank"], "import_s": None})
                continue
            task = {key: rank[key] for key in ("local_rank", "memory_fraction")}
            task.update({key: config[key] for key in ("device", "backend", "timeout_s", "preimport")}, **target)
            task["diagnostics"] = self.server_path(rank["rank"])
            child = start.start_worker(config, environ, rank["rank"], "worker", task, shown)
            child.reports = True
            self._started(child)
        return {str(child.rank): child.pid for child in self._ranks}

    def _started(self, child: "start.Worker") -> None:
        self._ranks.append(child)
        self._watch(child)
        self._emit("spawned", {"rank": child.rank, "pid": child.pid})
        self.signs.follow(child.rank, child.pid)
        if child.rank == self._config["stdin_rank"]:
            self._stdin = Stdin(self._loop, child.stdin_fd)

    def start_store(self, bound: "socket.socket") -> None:
        """Start the store for a bound socket, which it takes over when the gate opens. Raises CallRefused."""
        self._store_socket = bound
        address, port = bound.getsockname()[:2]
        task = {
            "extension_only": self._store_only,
            "address": {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address),
            "port": port,
            "fd": bound.fileno(),
            "timeout_s": self._config["timeout_s"],
        }
        environ = dict(self._environ, CUDA_VISIBLE_DEVICES="")
        child = start.start_worker(
            self._config, environ, _STORE, "store", task, ["gpuboard-store", str(port)], keep=(bound.fileno(),)
        )
        self._store = child
        self._watch(child)
        if self._gate is not None:
            child.send({"t": "open"})
            self._watch_link(child)

    def open_gate(self, environ: "Dict[str, str]") -> None:
        """Let the ranks run the target with these variables added to their environment."""
        self._gate = environ
        if self._store is not None:
            self._store.send({"t": "open"})
            self._watch_link(self._store)
        for child in self.running():
            child.send({"t": "go", "environ": environ})
            self._watch_link(child)
        if self._config["target"]["kind"] == "program":
            self.start_ranks()

    def signal(self, number: int, wanted: "Optional[Collection[int]]") -> "List[int]":
        """Signal the ranks' own processes; return the ranks that got it."""
        return [
            child.rank
            for child in self.running()
            if (wanted is None or child.rank in wanted) and teardown.send_signal(child.pid, number)
        ]

    def write_stdin(self, data: bytes, end: bool, done: "Callable[[bool], None]") -> None:
        """Write input to the rank that gets it; see Stdin.write. Raises CallRefused once it is closed."""
        if self._stdin is None or self._stdin.closed:
            raise CallRefused("closed", "no rank of this node reads its standard input")
        self._stdin.write(data, end, done)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading the ranks' output; they block while their pipes are full."""
        if paused == self._paused:
            return
        self._paused = paused
        for child in self._children():
            for stream in child.streams:
                if not stream.closed:
                    stream.restart_wait(time.monotonic())
                    self._watch_stream(stream)

    def ended(self, pid: int, status: int) -> None:
        """Process the end of a child: ``status`` is its exit code, or minus the signal's number."""
        for child in self._children():
            if child.pid == pid and child.status is None:
                child.ended(status)
                self._drain(child)
                if child is self._store:
                    self._store_ended(child, status)
                else:
                    self._rank_ended(child, status)

    def close(self) -> None:
        """Read what is left in the pipes and close them."""
        for child in self._children():
            self._drain(child)
            self._close(child)

    # one child

    def _children(self) -> "List[start.Worker]":
        return self._ranks + ([self._store] if self._store is not None else [])

    def _watch(self, child: "start.Worker") -> None:
        # The link first: poll keeps this order, so `raised` is sent before the traceback that is printed after it.
        self._watch_link(child)
        for stream in child.streams:
            self._watch_stream(stream)

    def _watch_stream(self, stream: "Stream") -> None:
        if self._paused:
            self._loop.unwatch(stream.fd)
        else:
            self._loop.watch(stream.fd, IN, lambda: self._read(stream))

    def _watch_link(self, child: "start.Worker") -> None:
        self._loop.watch(child.link.fileno(), IN | OUT if child.pending else IN, lambda: self._exchange(child))

    def _exchange(self, child: "start.Worker") -> None:
        child.flush()
        if not self._receive(child):
            self._watch_link(child)
        elif child.reports and not proc.is_exiting(child.pid):
            child.reports = False
            self._emit("disconnected", {"rank": child.rank})

    def _receive(self, child: "start.Worker") -> bool:
        """Process the messages of a child; return whether it has closed its link."""
        messages, closed = child.receive()
        for message in messages:
            kind = message.pop("t", None)
            if child is self._store:
                self._on_store_message(kind, message)
            elif kind == "gate":
                child.at_gate = True
                self._emit("gate", dict(message, rank=child.rank))
            elif kind == "joined":
                child.joined, child.all_ranks = True, bool(message.get("all_ranks"))
                self._emit("joined", dict(message, rank=child.rank))
            elif kind == "raised":
                child.reports = False
                note = message.get("note")
                found = evidence.child_death("%s %s" % (message.get("message"), note), self._killed_for_memory)
                if found is not None:
                    message["note"] = "%s, %s" % (note, found) if note else found
                self._emit("raised", dict(message, rank=child.rank))
            elif kind == "leaving":
                child.reports = False
                self._emit("leaving", dict(message, rank=child.rank))
            elif kind == "measured":
                self._emit("measured", dict(message, rank=child.rank))
        if closed:
            self._loop.unwatch(child.link.fileno())
        return closed

    def _read(self, stream: "Stream") -> None:
        now = time.monotonic()
        pieces = stream.read(now)
        if stream.closed:
            self._loop.unwatch(stream.fd)
        self._pass(stream, pieces or [])
        if stream.due() is not None and not self._flushing:
            self._flushing = True
            self._loop.after(0.1, self._flush_held)

    def _flush_held(self) -> None:
        """Send text that has waited for its line end long enough."""
        self._flushing = False
        now = time.monotonic()
        held = False
        for child in self._children():
            for stream in child.streams:
                if not self._paused:  # while paused, the rest of the line may be in the pipe
                    self._pass(stream, stream.overdue(now))
                held = held or stream.due() is not None
        if held:
            self._flushing = True
            self._loop.after(0.1, self._flush_held)

    def _pass(self, stream: "Stream", pieces: "List[bytes]") -> None:
        for piece in pieces:
            if stream.rank != _STORE:
                self.signs.wrote(stream.rank)
                self._emit("output", dict(output.content(piece), rank=stream.rank, stream=stream.name))
            elif not self._store_only or self._store_ready:  # not of the first attempt
                self._emit("notice", {"text": "store: " + piece.decode("utf-8", "replace").rstrip()})

    def _drain(self, child: "start.Worker") -> None:
        """Read what an ended child left in its pipes; its helpers may write more."""
        if child.link.fileno() >= 0:
            self._receive(child)
            self._loop.unwatch(child.link.fileno())
            child.link.close()
        for stream in child.streams:
            for _ in range(_DRAIN_READS):
                pieces = None if stream.closed else stream.read(time.monotonic())
                if stream.closed:
                    self._loop.unwatch(stream.fd)
                if pieces is None:
                    break
                self._pass(stream, pieces)
            if not stream.closed:
                self._pass(stream, stream.release())

    def _close(self, child: "start.Worker") -> None:
        for stream in child.streams:
            if not stream.closed:  # the number of a closed descriptor may be in use again
                self._loop.unwatch(stream.fd)
                self._pass(stream, stream.finish())

    def _rank_ended(self, child: "start.Worker", status: int) -> None:
        if self._stdin is not None and child.rank == self._config["stdin_rank"]:
            self._stdin.close()
        if self._config["wrap"] and status > 0 and not child.at_gate:
            text = "rank %d ended before it reached the gate; --wrap must pass on file descriptors and environment"
            self._emit("notice", {"text": text % child.rank})
        self.signs.ended(child.rank)
        killed = status == -signal.SIGKILL and not self.ending
        found = evidence.shared_memory() if status == -signal.SIGBUS else None
        if status != 0 and found is None:
            found = evidence.recorded(self._in_scratch("error-%d.json" % child.rank))
        self._emit(
            "exited",
            {
                "rank": child.rank,
                "code": status if status >= 0 else None,
                "signal": -status if status < 0 else None,
                "oom": self._killed_for_memory.evidence(child.pid) if killed else None,
                "oom_readable": self._killed_for_memory.readable,
                "evidence": found,
                "ran_s": round(time.monotonic() - child.started, 3),
                "joined": child.joined,
            },
        )

    # the store

    def _on_store_message(self, kind: "Any", message: "Dict[str, Any]") -> None:
        assert self._store_socket is not None
        if kind == "ready":
            self._store_ready = True
            port = self._store_socket.getsockname()[1]
            only = self._store_only
            self._emit("store", {"state": "ready", "port": port, "extension_only": only, "code": None})
        elif kind == "open":
            self._store_socket.close()  # the store holds it now
        elif kind == "failed":
            self._emit("notice", {"text": "the store cannot open the master port: %s" % message.get("text")})

    def _store_ended(self, child: "start.Worker", status: int) -> None:
        self._store = None
        self._close(child)
        if self.ending:
            return  # killed by this supervisor
        assert self._store_socket is not None
        if self._store_only and not self._store_ready and status != -signal.SIGKILL:
            self._store_only = False  # second attempt, with all of torch
            self.start_store(self._store_socket)
            return
        data = {"state": "died", "port": None, "extension_only": self._store_only, "code": status}
        self._loop.after(_SIGTERM_S if status == -signal.SIGTERM else 0.0, lambda: self._store_lost(data))
