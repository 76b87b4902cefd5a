"""One node's part of a launch: it answers the head's calls, keeps the gang of ranks, and leaves the node empty."""

import os
import platform
import signal
import socket
import time

from gpuboard.agent.event_loop import IN, OUT, Loop
from gpuboard.agent.launch import CallRefused, network, preflight, teardown
from gpuboard.agent.launch import start as ranks
from gpuboard.agent.launch.workers import Gang

MYPY = False
if MYPY:
    from typing import Any, Callable, Collection, Dict, Optional

    from gpuboard.agent.protocol import AgentChannel

_FULL = 1024 * 1024  # bytes waiting for the head above which the ranks' pipes are not read
_EMPTY = 256 * 1024  # and below which they are again
_LIFE_LINE_GRACE_S = 1.0  # between SIGTERM and SIGKILL when the head is gone
_KILL_S = 4.0
_LAST_WORDS_S = 2.0  # for what is still to be sent when the head is gone, and may be read by who carries it
_HELPERS_TOLD_S = 3.0  # multiprocessing's own helpers end by themselves sooner, also on a machine that is busy
_LATER = object()  # a call that is answered when its work is done


class Supervisor:
    """Runs until every process of the run on this node is gone. ``config``: docs/launch-protocol.md."""

    def __init__(self, channel: "AgentChannel", config: "Dict[str, Any]", guard_life: int, guard_pid: int) -> None:
        self._channel = channel
        self._config = config
        self._guard_life = guard_life
        self._guard_pid = guard_pid
        self._loop = Loop()
        self._environ = ranks.node_environ(config)
        self._gang = Gang(self._loop, channel.event, config, self._environ)
        self._answering = network.Answering(self._loop, config["secret"])
        self._master: "Optional[socket.socket]" = None
        self._spawned = False
        self._opened = False  # the gate
        self._gone = False  # the connection to the head has ended, and that was acted upon
        self._held = False  # the head asked for no output
        self._heard_at = time.monotonic()
        self._ending_at: "Optional[float]" = None  # SIGKILL at this moment (monotonic)
        self._ending_timer = 0
        self._stop_asked = False
        self._helpers_until: "Optional[float]" = None
        self._helpers_timer = 0
        self._finished = False
        self._calls: "Dict[str, Callable[[int, Dict[str, Any]], Any]]" = {
            "check": self._check,
            "listen": self._listen,
            "probe-listen": self._probe_listen,
            "probe-connect": self._probe_connect,
            "spawn": self._spawn,
            "go": self._go,
            "hold": self._hold,
            "signal": self._signal,
            "stop": self._stop,
            "processes": self._processes,
            "ping": lambda _id, _args: {},
        }

    def run(self) -> None:
        """Serve the head until the node is empty."""
        teardown.adopt_orphans()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        # Handlers, not SIG_IGN: an ignored signal would be inherited by every rank.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        self._loop.watch(wake_read, IN, lambda: self._woken(wake_read))
        self._loop.watch(self._channel.fd_in, IN, self._hear)
        self._loop.watch(self._channel.fd_noise, IN, self._channel.pass_noise)
        self._loop.watch(self._guard_life, IN, self._guard_died)
        if self._config["lost_head_s"] is not None:
            self._loop.after(1.0, self._look_for_head)
        self._channel.send(hello())
        self._hear()  # calls may have arrived in the same read as the start line
        while not self._finished:
            self._loop.turn()
            self._steer()

    def _steer(self) -> None:
        """Follow the connection: write when it takes more, slow the ranks down when it does not, end with it."""
        channel = self._channel
        if channel.closed and not self._gone:
            self._gone = True
            self._loop.unwatch(channel.fd_in)
            self._loop.unwatch(channel.fd_out)
            self._end("the connection to the head ended", _LIFE_LINE_GRACE_S)
        if channel.closed:
            self._gang.pause(False)
            return
        if channel.pending:
            self._loop.watch(channel.fd_out, OUT, channel.flush)
        else:
            self._loop.unwatch(channel.fd_out)
        if self._held or channel.pending > _FULL:
            self._gang.pause(True)
        elif channel.pending < _EMPTY:
            self._gang.pause(False)

    # what arrives

    def _hear(self) -> None:
        from gpuboard.agent import protocol  # late: only its exception is needed

        try:
            messages = self._channel.read_available()
        except protocol.BadStream as error:
            self._notice("%s; this node is stopped" % error)
            self._channel.closed = True
            return
        for message in messages:
            self._heard_at = time.monotonic()
            if message.get("t") == "call":
                self._answer(int(message["id"]), str(message.get("op")), message.get("args") or {})

    def _answer(self, call: int, op: str, args: "Dict[str, Any]") -> None:
        handler = self._calls.get(op)
        try:
            if handler is None:
                raise CallRefused("unknown", "this supervisor knows no call %r" % op)
            value = handler(call, args)
        except CallRefused as error:
            self._channel.refuse(call, error.kind, str(error), error.detail)
        except (KeyError, TypeError, ValueError) as error:
            self._channel.refuse(call, "arguments", "%s: %s" % (type(error).__name__, error))
        else:
            if value is not _LATER:
                self._channel.reply(call, value)

    def _woken(self, wake: int) -> None:
        try:
            os.read(wake, 4096)
        except BlockingIOError:
            pass  # another call-back of this turn has read it
        self._reap()

    def _signalled(self, number: int, _frame: "Any") -> None:
        self._loop.after(0.0, lambda: self._end(teardown.signal_words(number), _LIFE_LINE_GRACE_S))

    def _guard_died(self) -> None:
        self._loop.unwatch(self._guard_life)
        self._end("the guard process is gone", 0.0)

    def _look_for_head(self) -> None:
        silent = time.monotonic() - self._heard_at
        if silent > self._config["lost_head_s"]:
            self._end("nothing heard from the head for %d s" % silent, _LIFE_LINE_GRACE_S)
        else:
            self._loop.after(1.0, self._look_for_head)

    # calls

    def _check(self, _call: int, _args: "Dict[str, Any]") -> "Any":
        return preflight.gather(self._config, self._environ)

    def _listen(self, _call: int, args: "Dict[str, Any]") -> "Any":
        if self._master is not None:
            raise CallRefused("state", "the master port is bound already")
        self._master = network.listen(str(args["host"]), int(args["port"]))
        address, port = self._master.getsockname()[:2]
        self._answering.add(self._master)
        if self._spawned:
            self._gang.start_store(self._master)
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
        network.Attempts(
            self._loop,
            self._config["secret"],
            list(args["targets"]),
            float(args["timeout_s"]),
            lambda results: self._channel.reply(call, {"results": results}),
        )
        return _LATER

    def _spawn(self, _call: int, _args: "Dict[str, Any]") -> "Any":
        if self._spawned or self._gang.running() or self._ending_at is not None:
            raise CallRefused("state", "the ranks were started already, or this node is being stopped")
        stale = ranks.stale(dict(os.environ, **self._config["environ"]))
        if stale:
            self._notice("set anew for every rank, the environment had: " + ", ".join(stale))
        if self._master is not None:
            self._gang.start_store(self._master)
        pids = self._gang.start_ranks()
        self._spawned = True
        return {"pids": pids}

    def _go(self, _call: int, args: "Dict[str, Any]") -> "Any":
        if not self._spawned:
            raise CallRefused("state", "the gate opens after spawn")
        if self._config["listen"] and self._master is None:
            raise CallRefused("state", "the gate opens after listen: there is no store to meet at")
        # What this node's own environment says (a site's profile names the interface) stands.
        offered = (args.get("environ") or {}).items()
        environ = {str(name): str(value) for name, value in offered if name not in self._environ}
        environ["MASTER_ADDR"] = str(args["master_addr"])
        environ["MASTER_PORT"] = str(args["master_port"])
        if self._master is not None:
            self._answering.leave(self._master)
        self._answering.stop()
        self._gang.open_gate(environ)
        self._opened = True
        self._loop.after(0.0, self._reap)  # they may all have ended before
        return {}

    def _hold(self, _call: int, args: "Dict[str, Any]") -> "Any":
        self._held = bool(args["on"])
        if self._held:
            self._gang.pause(True)
        return {}

    def _signal(self, _call: int, args: "Dict[str, Any]") -> "Any":
        wanted = args.get("ranks")
        return {"sent": self._gang.signal(int(args["signal"]), None if wanted is None else set(wanted))}

    def _stop(self, _call: int, args: "Dict[str, Any]") -> "Any":
        self._stop_asked = True
        grace_s = float(args["grace_s"])
        if self._helpers_until is not None:  # the ranks ended well; what is left may finish, but no longer than this
            self._helpers_until = min(self._helpers_until, time.monotonic() + grace_s)
            self._look_soon(0.0)
        else:
            self._end(None, grace_s, set(args.get("spare") or ()))
        return {}

    def _processes(self, _call: int, _args: "Dict[str, Any]") -> "Any":
        processes = teardown.read_processes()
        found = []
        for child in self._gang.running():
            for pid in sorted({child.pid} | teardown.descendants(child.pid, processes)):
                if pid in processes:
                    process = processes[pid]
                    found.append(
                        {
                            "pid": pid,
                            "rank": child.rank,
                            "state": process.state,
                            "cpu_s": process.cpu_s,
                            "rss": process.rss,
                        }
                    )
        return {"processes": found}

    # the end

    def _reap(self) -> None:
        """Wait for every child that has ended, orphans that came to us included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._gang.ended(pid, os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
        if self._gang.store_lost and self._gang.running():
            self._end("the store died", _LIFE_LINE_GRACE_S)
        asked_all = self._opened or self._ending_at is not None  # before, the head has questions yet, also about this
        over = self._spawned and not self._finished and not self._gang.running()
        if over and asked_all and self._helpers_until is None:
            self._ranks_ended()

    def _ranks_ended(self) -> None:
        """The last rank of this node is gone: let helpers of ranks that ended well finish, end the others."""
        well = self._gang.all_well() and self._ending_at is None
        self._helpers_until = time.monotonic() + (float(self._config["helper_grace_s"]) if well else 0.0)
        if well:
            self._loop.after(_HELPERS_TOLD_S, self._tell_helpers)
        self._look_soon(0.0)

    def _tell_helpers(self) -> None:
        helpers = [] if self._finished else self._helpers()
        if helpers:
            names = ", ".join("pid %d (%s)" % (process.pid, process.name) for process in helpers[:8])
            self._notice("the ranks ended; waiting for what they left behind: %s" % names)

    def _look_soon(self, seconds: float) -> None:
        self._loop.cancel(self._helpers_timer)
        self._helpers_timer = self._loop.after(seconds, self._look_for_helpers)

    def _look_for_helpers(self) -> None:
        assert self._helpers_until is not None
        if self._finished:
            return
        started = time.monotonic()
        if self._helpers() and started < self._helpers_until:
            # On a node of many processes a look costs more: a tenth of one core at most.
            self._look_soon(max(0.1, 10 * (time.monotonic() - started)))
        elif (
            self._gang.store_pid is None
            or self._stop_asked
            or self._ending_at is not None
            or self._config["nodes"] == 1
        ):
            self._kill()
        else:  # other nodes' ranks still need the store; the head says when it may end
            teardown.kill_all(self._config["run"], os.getpid(), self._spared(), self._reap, _KILL_S)
            self._look_soon(2.0)

    def _helpers(self) -> "Any":
        return teardown.living(self._config["run"], os.getpid(), self._spared())

    def _spared(self) -> "Any":
        return [self._guard_pid] + ([self._gang.store_pid] if self._gang.store_pid is not None else [])

    def _end(self, reason: "Optional[str]", grace_s: float, spare: "Collection[int]" = ()) -> None:
        """SIGCONT and SIGTERM to the ranks now, SIGKILL to everything after the grace (an earlier end stands).

        ``spare``: ranks that get no SIGTERM, since they are ending by themselves.
        """
        if self._finished:
            return
        deadline = time.monotonic() + grace_s
        if reason is not None and self._ending_at is None:
            self._channel.event("stopping", {"reason": reason})  # before the ends of ranks that follow from it
        if self._ending_at is None:
            self._gang.signal(signal.SIGTERM, {child.rank for child in self._gang.running()} - set(spare))
            self._gang.signal(signal.SIGCONT, None)  # after it, so that a stopped rank wakes up to the request
        elif deadline >= self._ending_at:
            return
        self._loop.cancel(self._ending_timer)
        self._ending_at = deadline
        self._ending_timer = self._loop.after(0.0 if not self._gang.running() else grace_s, self._kill)

    def _kill(self) -> None:
        """End every process of the run on this node and say so."""
        if self._finished:
            return
        self._finished = True
        self._gang.ending = True
        self._answering.stop()
        left = teardown.kill_all(self._config["run"], os.getpid(), [self._guard_pid], self._reap, _KILL_S)
        self._reap()
        self._gang.close()
        self._channel.event("ended", {"left": left})
        # Nothing runs here any more: a head that is stopped (ctrl-Z) or far away gets as long as it may be silent.
        silence_s = float("inf") if self._config["lost_head_s"] is None else float(self._config["lost_head_s"])
        self._channel.drain(_LAST_WORDS_S if self._channel.closed else max(_LAST_WORDS_S, silence_s))

    def _notice(self, text: str) -> None:
        self._channel.event("notice", {"text": text})


def hello() -> "Dict[str, Any]":
    """Return the agent's first message (gpuboard/model/reading.py, Hello)."""
    import pwd  # late: not needed where ranks run

    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    own = [ip for name, ips in sorted(network.addresses().items()) if name != "lo" for ip in ips]
    return {
        "t": "hello",
        "hostname": socket.gethostname(),
        "boot_id": boot_id,
        "uid": uid,
        "user": user,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "addresses": own,
    }
