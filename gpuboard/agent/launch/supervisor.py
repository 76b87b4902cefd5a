"""The supervisor: one node's part of a launch. It serves the head's calls, runs the workers, and ends all processes."""

import binascii
import errno
import os
import platform
import signal
import socket
import time

from gpuboard.agent import proc
from gpuboard.agent.event_loop import IN, OUT, Loop
from gpuboard.agent.launch import CallRefused, network, preflight, scratch, start, teardown
from gpuboard.agent.launch.watch import inspection, pace, signs
from gpuboard.agent.launch.watch.forked import Looks
from gpuboard.agent.launch.workers import WorkerGroup

MYPY = False
if MYPY:
    from typing import Any, Callable, Collection, Dict, List, Optional, Tuple

    from gpuboard.agent.protocol import AgentChannel

# bytes queued for the head, above and below which reading the ranks' output is paused and resumed
_FULL, _EMPTY = 1024 * 1024, 256 * 1024
_LOST_GRACE_S = 1.0  # from SIGTERM to SIGKILL without a head: the node is to be empty within 5 s
_KILL_S = 4.0  # after which processes that survive SIGKILL are reported
_DRAIN_S = 2.0  # for sending the rest when the connection has ended: its reader may still take it
_HELPERS_REPORT_S = 2.0  # multiprocessing's own helpers end sooner, on a busy node too
_LATER = object()  # value of a call whose reply follows


class Supervisor:
    """Runs until every process of the run on this node has ended. ``config``: docs/launch-protocol.md."""

    def __init__(self, channel: "AgentChannel", config: "Dict[str, Any]", guard_life: int, guard_pid: int) -> None:
        self._channel = channel
        self._config = config
        self._guard_life = guard_life
        self._guard_pid = guard_pid
        self._loop = Loop()
        self._environ = start.node_environ(config)
        self._workers = WorkerGroup(self._loop, channel.event, self._store_lost, config, self._environ)
        self._looks = Looks(self._loop)
        self._answering = network.Answering(self._loop, config["secret"])
        self._master: "Optional[socket.socket]" = None
        self._spawned = False
        self._opened = False  # the gate
        self._head_lost = False  # the connection has ended, and teardown has begun
        self._program = config["target"]["kind"] == "program"
        self._held = False  # the head has paused the output
        self._received_at = time.monotonic()
        self._ending_at: "Optional[float]" = None  # SIGKILL at this moment (monotonic)
        self._ending_timer = 0
        self._stop_asked = False
        self._helpers_until: "Optional[float]" = None
        self._helpers_timer = 0
        self._finished = False
        self._pyspy: "Optional[str]" = inspection.pyspy(None, None)
        self._calls: "Dict[str, Callable[[int, Dict[str, Any]], Any]]" = {
            "check": self._check,
            "listen": self._listen,
            "probe-listen": self._probe_listen,
            "probe-connect": self._probe_connect,
            "spawn": self._spawn,
            "go": self._go,
            "hold": self._hold,
            "signal": self._signal,
            "stdin": self._stdin,
            "stop": self._stop,
            "inspect": self._inspect,
            "py-spy": self._take_pyspy,
            "pace": self._pace,
            "ping": lambda _id, _args: {},
        }

    def run(self) -> None:
        """Serve the head until no process of the run is left."""
        teardown.adopt_orphans()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        # Handlers, not SIG_IGN: ranks inherit ignored signals.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        self._loop.watch(wake_read, IN, lambda: self._woken(wake_read))
        self._loop.watch(self._channel.fd_in, IN, self._read_calls)
        self._loop.watch(self._channel.fd_noise, IN, self._channel.pass_noise)
        self._loop.watch(self._guard_life, IN, self._guard_died)
        self._loop.after(signs.INTERVAL_S, self._sample)
        if self._config["lost_head_s"] is not None:
            self._loop.after(1.0, self._check_head)
        self._channel.send(hello())
        if self._config["attempt"] > 1:  # whose connection may have been lost: what it left here ends before the ranks
            earlier = dict(self._config, attempt=self._config["attempt"] - 1)
            teardown.kill_all(earlier, os.getpid(), [self._guard_pid], self._reap, _KILL_S)
        self._read_calls()  # calls may have arrived in the same read as the start line
        while not self._finished:
            self._loop.turn()
            self._steer()

    def _steer(self) -> None:
        """Follow the connection: send what is queued, pause the ranks if that is much, stop them at its end."""
        channel = self._channel
        if channel.closed and not self._head_lost:
            self._head_lost = True
            self._loop.unwatch(channel.fd_in)
            self._loop.unwatch(channel.fd_out)
            self._end("the connection to `gpuboard launch` was lost", _LOST_GRACE_S)
        if channel.closed:
            self._workers.pause(False)
            return
        if channel.pending:
            self._loop.watch(channel.fd_out, OUT, channel.flush)
        else:
            self._loop.unwatch(channel.fd_out)
        if self._held or channel.pending > _FULL:
            self._workers.pause(True)
        elif channel.pending < _EMPTY:
            self._workers.pause(False)

    # what arrives

    def _read_calls(self) -> None:
        from gpuboard.agent import protocol  # late: only its exception is needed

        try:
            messages = self._channel.read_available()
        except protocol.BadStream as error:
            self._notice("%s; the ranks of this node are being stopped" % error)
            self._channel.closed = True
            return
        for message in messages:
            self._received_at = time.monotonic()
            if message.get("t") == "call":
                self._answer(int(message["id"]), str(message.get("op")), message.get("args") or {})

    def _answer(self, call: int, op: str, args: "Dict[str, Any]") -> None:
        handler = self._calls.get(op)
        try:
            if handler is None:
                raise CallRefused("unknown", "unknown call %r" % op)
            value = handler(call, args)
        except CallRefused as error:
            self._channel.refuse(call, error.kind, str(error), error.detail)
        except OSError as error:
            if error.errno == errno.EMFILE:
                text = "%s: too many open files: the limit is %d" % (op, os.sysconf("SC_OPEN_MAX"))
                self._channel.refuse(call, "open-files", text)
            else:
                self._channel.refuse(call, "system", "%s: %s" % (op, error))
        except (KeyError, TypeError, ValueError) as error:
            self._channel.refuse(call, "arguments", "%s: %s" % (type(error).__name__, error))
        else:
            if value is not _LATER:
                self._channel.reply(call, value)

    def _woken(self, wake: int) -> None:
        try:
            os.read(wake, 4096)
        except BlockingIOError:
            pass  # read by another callback of this turn
        self._reap()

    def _signalled(self, number: int, _frame: "Any") -> None:
        self._loop.after(0.0, lambda: self._end(teardown.signal_text(number), _LOST_GRACE_S))

    def _guard_died(self) -> None:
        self._loop.unwatch(self._guard_life)
        self._end("the guard process died", 0.0)

    def _check_head(self) -> None:
        silence_s = time.monotonic() - self._received_at
        if silence_s > self._config["lost_head_s"]:
            self._end("no ping from `gpuboard launch` for %d s" % silence_s, _LOST_GRACE_S)
        else:
            self._loop.after(1.0, self._check_head)

    # calls

    def _check(self, _call: int, _args: "Dict[str, Any]") -> "Any":
        return preflight.gather(self._config, self._environ)

    def _listen(self, _call: int, args: "Dict[str, Any]") -> "Any":
        if self._master is not None:
            raise CallRefused("state", "the master port is already bound")
        self._master = network.listen(str(args["host"]), int(args["port"]))
        address, port = self._master.getsockname()[:2]
        self._answering.add(self._master)
        if self._spawned and not self._program:
            self._workers.start_store(self._master)
        return {"port": port, "address": address}

    def _probe_listen(self, _call: int, args: "Dict[str, Any]") -> "Any":
        any_address = "::" if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else "0.0.0.0"
        found = []
        for _ in range(int(args["count"])):
            listener = network.listen(any_address, 0)
            self._answering.add(listener)
            found.append(listener.getsockname()[1])
        return {"ports": found}

    def _probe_connect(self, call: int, args: "Dict[str, Any]") -> "Any":
        network.ConnectAttempts(
            self._loop,
            self._config["secret"],
            list(args["targets"]),
            float(args["timeout_s"]),
            lambda results: self._channel.reply(call, {"results": results}),
        )
        return _LATER

    def _spawn(self, _call: int, _args: "Dict[str, Any]") -> "Any":
        if self._spawned or self._workers.running() or self._ending_at is not None:
            raise CallRefused("state", "the ranks are already started, or this node is being stopped")
        stale = start.stale(dict(os.environ, **self._config["environ"]))
        if stale:
            self._notice("ignoring %s from your environment; gpuboard sets them for each rank" % ", ".join(stale))
        pids = {}
        if not self._program:  # a program starts when the gate opens, and whether it has a store is known then
            if self._master is not None:
                self._workers.start_store(self._master)
            pids = self._workers.start_ranks()
        self._spawned = True
        return {"pids": pids}

    def _go(self, _call: int, args: "Dict[str, Any]") -> "Any":
        if not self._spawned:
            raise CallRefused("state", "go needs spawn first")
        if self._config["listen"] and self._master is None:
            raise CallRefused("state", "go needs listen first: without it there is no store")
        # Variables of this node's own environment (a site's profile may name the interface) take precedence.
        offered = (args.get("environ") or {}).items()
        environ = {str(name): str(value) for name, value in offered if name not in self._environ}
        environ["MASTER_ADDR"] = str(args["master_addr"])
        environ["MASTER_PORT"] = str(args["master_port"])
        if self._master is not None:
            self._answering.leave(self._master)
        self._answering.stop()
        if not args.get("store", True):
            environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            if self._master is not None:
                self._master.close()  # the port is for rank 0
        elif self._program and self._master is not None:
            self._workers.start_store(self._master)
        self._workers.open_gate(environ)
        self._opened = True
        self._loop.after(0.0, self._reap)  # all may have ended before
        return {}

    def _hold(self, _call: int, args: "Dict[str, Any]") -> "Any":
        self._held = bool(args["on"])
        if self._held:
            self._workers.pause(True)
        return {}

    def _signal(self, _call: int, args: "Dict[str, Any]") -> "Any":
        wanted = args.get("ranks")
        return {"sent": self._workers.signal(int(args["signal"]), None if wanted is None else set(wanted))}

    def _stdin(self, call: int, args: "Dict[str, Any]") -> "Any":
        def done(still_open: bool) -> None:
            if still_open or args["end"]:
                self._channel.reply(call, {})
            else:
                self._channel.refuse(call, "closed", "the rank reads its standard input no more", None)

        self._workers.write_stdin(binascii.a2b_base64(args["data"]), bool(args["end"]), done)
        return _LATER

    def _stop(self, _call: int, args: "Dict[str, Any]") -> "Any":
        self._stop_asked = True
        grace_s = float(args["grace_s"])
        if self._helpers_until is not None:  # the ranks succeeded; their helpers have this long
            self._helpers_until = min(self._helpers_until, time.monotonic() + grace_s)
            self._check_helpers_after(0.0)
        else:
            self._end(None, grace_s, set(args.get("spare") or ()))
        return {}

    def _inspect(self, call: int, _args: "Dict[str, Any]") -> "Any":
        ranks = self._watched()

        def done(result: "Dict[str, Any]") -> None:
            result["pyspy"] = self._pyspy is not None
            store = proc.read_process(self._workers.store_pid) if self._workers.store_pid is not None else None
            if store is not None:
                result["store"] = {"node": self._config["node"], "pid": store.pid, "state": store.state}
            for item in result["ranks"]:
                cpu, moved_bytes = self._workers.signs.recent(item["rank"])
                item.update(cpu=round(cpu, 3), moved_bytes=moved_bytes)
            self._channel.reply(call, result)

        self._looks.start(lambda: inspection.inspect(ranks, self._pyspy), done)
        return _LATER

    def _pace(self, call: int, _args: "Dict[str, Any]") -> "Any":
        apart = {child.rank for child in self._workers.running() if not child.all_ranks}
        ranks, received = [one for one in self._watched() if one[0] not in apart], time.time()

        def done(result: "Dict[str, Any]") -> None:
            self._channel.reply(call, dict(result, received=received, replied=time.time()))

        self._looks.start(lambda: pace.look(ranks), done)
        return _LATER

    def _watched(self) -> "List[Tuple[int, int, str]]":
        """Return rank, pid and path of the worker server of every rank that runs."""
        return [(c.rank, c.pid, self._workers.server_path(c.rank)) for c in self._workers.running()]

    def _take_pyspy(self, _call: int, args: "Dict[str, Any]") -> "Any":
        """Take py-spy from the head: its path on this host, or the compressed program, kept in memory."""
        self._pyspy = inspection.pyspy(args.get("path"), args.get("data"))
        return {}

    def _sample(self) -> None:
        self._workers.signs.sample()
        self._loop.after(signs.INTERVAL_S, self._sample)

    # the end

    def _reap(self) -> None:
        """Wait for every child that has ended, adopted orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._workers.ended(pid, os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
        preflight_over = self._opened or self._ending_at is not None  # before, the head has more calls to make
        over = self._spawned and not self._finished and not self._workers.running()
        if over and preflight_over and self._helpers_until is None:
            self._ranks_ended()

    def _store_lost(self, event: "Dict[str, Any]") -> None:
        if self._ending_at is not None or self._finished:
            return  # an effect
        self._channel.event("store", event)
        if self._workers.running():
            self._end("the rendezvous store died", _LOST_GRACE_S)

    def _ranks_ended(self) -> None:
        """After the end of this node's last rank: give helpers their grace if all ranks succeeded, else end them."""
        succeeded = self._workers.all_succeeded() and self._ending_at is None
        self._helpers_until = time.monotonic() + (float(self._config["helper_grace_s"]) if succeeded else 0.0)
        if succeeded:
            self._loop.after(_HELPERS_REPORT_S, self._report_helpers)
        self._check_helpers_after(0.0)

    def _report_helpers(self) -> None:
        helpers = [] if self._finished else self._helpers()
        if helpers:
            names = ", ".join("pid %d (%s)" % (process.pid, process.name) for process in helpers[:8])
            assert self._helpers_until is not None
            left_s = max(0.0, self._helpers_until - time.monotonic())
            text = "the ranks have ended; waiting up to %.0f s (--helper-grace) for processes they left running: %s"
            self._notice(text % (left_s, names))

    def _check_helpers_after(self, seconds: float) -> None:
        self._loop.cancel(self._helpers_timer)
        self._helpers_timer = self._loop.after(seconds, self._check_helpers)

    def _check_helpers(self) -> None:
        assert self._helpers_until is not None
        if self._finished:
            return
        started = time.monotonic()
        if self._helpers() and started < self._helpers_until:
            # at most a tenth of one core: reading /proc takes long on a node with many processes
            self._check_helpers_after(max(0.1, 10 * (time.monotonic() - started)))
        elif (
            self._workers.store_pid is None
            or self._stop_asked
            or self._ending_at is not None
            or self._config["nodes"] == 1
        ):
            self._kill()
        else:  # ranks of other nodes still need the store, until the head calls stop
            teardown.kill_all(self._config, os.getpid(), self._spared(), self._reap, _KILL_S)
            self._check_helpers_after(2.0)

    def _helpers(self) -> "Any":
        return teardown.living(self._config, os.getpid(), [*self._spared(), *self._looks.pids])

    def _spared(self) -> "Any":
        return [self._guard_pid] + ([self._workers.store_pid] if self._workers.store_pid is not None else [])

    def _end(self, reason: "Optional[str]", grace_s: float, spare: "Collection[int]" = ()) -> None:
        """Send SIGTERM and SIGCONT to the ranks now and SIGKILL to all after the grace; an earlier deadline stays.

        ``spare``: ranks that get no SIGTERM, since they are exiting already.
        """
        if self._finished:
            return
        deadline = time.monotonic() + grace_s
        if reason is not None and self._ending_at is None:
            self._channel.event("stopping", {"reason": reason})  # before the exits that follow from it
        if self._ending_at is None:
            self._workers.signal(signal.SIGTERM, {child.rank for child in self._workers.running()} - set(spare))
            self._workers.signal(signal.SIGCONT, None)  # second: a stopped rank then finds SIGTERM pending
        elif deadline >= self._ending_at:
            return
        self._loop.cancel(self._ending_timer)
        self._ending_at = deadline
        self._ending_timer = self._loop.after(0.0 if not self._workers.running() else grace_s, self._kill)

    def _kill(self) -> None:
        """Kill every process of the run on this node and report it."""
        if self._finished:
            return
        self._finished = True
        self._workers.ending = True
        self._answering.stop()
        left = teardown.kill_all(self._config, os.getpid(), [self._guard_pid], self._reap, _KILL_S)
        self._reap()
        self._workers.close()
        scratch.remove(self._config)
        self._channel.event("ended", {"left": left})
        # No rank runs any more, so a suspended or slow head may take as long to read the rest as it may be silent.
        lost_head_s = float("inf") if self._config["lost_head_s"] is None else float(self._config["lost_head_s"])
        self._channel.drain(_DRAIN_S if self._channel.closed else max(_DRAIN_S, lost_head_s))

    def _notice(self, text: str) -> None:
        self._channel.event("notice", {"text": text})


def hello() -> "Dict[str, Any]":
    """Return the agent's first message (gpuboard/model/reading.py, Hello)."""
    uid = os.getuid()
    try:
        boot_id = proc.boot_id()
    except OSError:
        boot_id = ""
    own = [ip for name, ips in sorted(network.addresses().items()) if name != "lo" for ip in ips]
    return {
        "t": "hello",
        "hostname": socket.gethostname(),
        "boot_id": boot_id,
        "uid": uid,
        "user": proc.user_name(uid),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "addresses": own,
    }
