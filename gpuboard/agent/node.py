"""Role ``node``: readings of this node's GPUs each tick, and the calls on claims and processes.

One loop over the client, the NVML process and the clock. It never blocks on NVML: calls are answered and readings are
sent even if NVML hangs. Interface: docs/agent-protocol.md.
"""

import os
import sys
import time

from gpuboard.agent import delta, protocol
from gpuboard.agent.event_loop import IN, OUT, poll
from gpuboard.agent.nvml import monitor as probes
from gpuboard.agent.nvml import terms

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Set, Tuple, Union

    from gpuboard.agent.simulate.gpus import Simulated
    from gpuboard.agent.slurm_gpus import JobGpus

FIRST_S = 3.5  # the first reading waits this long for NVML; one hanging GPU is detected in less
LATE_S = 1.0  # the same for later readings; then the last values are sent
READ_S = 5.0  # deadline of a call of `read`
OLD_S = 20.0  # longest time without a reading; clients mark a node stale after a minute
BACKLOG = 1024 * 1024  # bytes; while this much waits for the client, no new readings are sent


def run(channel: protocol.AgentChannel, config: "Dict[str, Any]") -> None:
    """Serve until the connection ends. ``config`` as in docs/agent-protocol.md."""
    probe: "Union[probes.Probe, Simulated]"
    if config.get("simulate"):
        from gpuboard.agent.simulate.gpus import Simulated  # late: only for the demo

        probe = Simulated(config["simulate"], str(config.get("node")), channel.fd_in)
    else:
        fds = (channel.fd_in, channel.fd_out, channel.fd_noise)
        probe = probes.Probe(fds, rates=bool(config.get("interval_s")))
    first = probe.start()  # before other imports: it takes longest
    node = _Node(channel, config, probe, first)
    try:
        node.loop()
    finally:
        probe.stop()


class _Node:
    def __init__(self, channel: protocol.AgentChannel, config: "Dict[str, Any]", probe: "Any", first: int) -> None:
        from gpuboard.agent import proc, processes, traffic  # late: the NVML process is running meanwhile
        from gpuboard.agent.claims import store as claims

        self.channel = channel
        self.probe = probe
        self.name = str(config.get("node"))
        self.interval_s: "Optional[float]" = config.get("interval_s")
        self.job: "Optional[JobGpus]" = None  # set where only a job's GPUs are listed
        if config.get("job"):
            from gpuboard.agent.slurm_gpus import JobGpus  # late: only in a job

            self.job = JobGpus(os.environ)
        simulated = probe.source == "simulated"
        self.claims = claims
        self.folder = (probe.folder if simulated else claims.Folder)(str(config.get("claims_dir") or "/var/tmp"))
        if self.job is not None:
            self.folder.job = self.job.tag
        self.procfs = proc
        self.processes = processes.Processes()
        self.host = probe.host if simulated else proc.Host()
        self.traffic = None if simulated else traffic.Traffic()
        self.seq = 0
        self.deltas = delta.Deltas() if config.get("deltas") else None
        self.sent_version = 0
        self.sent_done = 0  # the pass whose values were sent last
        self.sent_at = time.monotonic()
        self.due: "Optional[float]" = None  # the next tick
        self.wanted: "Optional[Tuple[int, float]]" = None  # (pass that a reading waits for, when it is sent anyway)
        self.reads: "List[Tuple[int, int, float]]" = []  # (call id, pass, deadline)
        self.silence_s: "Optional[float]" = config.get("silence_s")
        now = self.received_at = time.monotonic()
        if config.get("now"):
            self.wanted = (first, now + FIRST_S)
        if self.interval_s:
            self.due = now + self.interval_s

    def loop(self) -> None:
        self.channel.send(hello(self.processes.user(os.getuid())))
        for message in self.channel.read_available():  # calls that arrived with the start line
            self._message(message)
        self._send_what_is_ready(time.monotonic())  # simulated GPUs have no delay
        while not self.channel.closed:
            now = time.monotonic()
            times = [at for at in (self.probe.check(now), self.due) if at is not None]
            given_up = ([self.wanted[1]] if self.wanted else []) + [read[2] for read in self.reads]
            times += [at + self.probe.slow_s for at in given_up]
            times += [self.received_at + self.silence_s] if self.silence_s else []
            self._wait(max(0.0, min(times) - now) if times else None)
            now = time.monotonic()
            if self.silence_s and now - self.received_at >= self.silence_s:
                return
            if self.due is not None and now >= self.due:
                self._tick(now)
            self._send_what_is_ready(now)

    def _wait(self, timeout_s: "Optional[float]") -> None:
        channel = self.channel
        watched = dict.fromkeys([channel.fd_in, channel.fd_noise] + self.probe.fds(), IN)
        watched[channel.fd_out] = OUT if channel.pending else 0  # 0: only its end, when the client reads no more
        for fd, event in poll(watched, timeout_s).items():
            if fd == channel.fd_in:
                self.received_at = time.monotonic()
                for message in channel.read_available():
                    self._message(message)
            elif fd == channel.fd_noise:
                channel.pass_noise()
            elif fd == channel.fd_out:
                if event & ~OUT:  # POLLERR, POLLHUP
                    channel.closed = True
                channel.flush()
            elif fd in self.probe.fds():
                self.probe.on_readable(fd)

    def _message(self, message: "Dict[str, Any]") -> None:
        if message.get("t") == "tick":
            self.due = time.monotonic() + max(0.0, float(message["in_ms"]) / 1000.0)
        elif message.get("t") == "call":
            self._call(int(message["id"]), str(message.get("op")), message.get("args") or {})

    def _call(self, call_id: int, op: str, args: "Dict[str, Any]") -> None:
        if op == "read":
            self.folder.refresh()
            self.reads.append((call_id, self.probe.ask(), time.monotonic() + READ_S))
        elif op == "carriers":
            uuids = set(args.get("uuids") or ())
            leave_out = [os.getpid()] + self.probe.pids()
            found = self.processes.carriers(str(args["lease"]), self._pids_on(uuids), os.getuid(), leave_out)
            self.channel.reply(call_id, {"processes": found})
        elif op == "signal":
            self._signal(call_id, args)
        elif op == "look":
            self.probe.look(args.get("uuid"))
            self.channel.reply(call_id, {})
        elif op in self.claims.OPS:
            try:
                self.channel.reply(call_id, self.claims.handle(op, args, self.folder))
            except self.claims.Refuse as refused:
                self.channel.refuse(call_id, refused.kind, refused.message, refused.detail)
        else:
            self.channel.refuse(call_id, "unknown-op", "this agent has no call %r" % op)

    def _signal(self, call_id: int, args: "Dict[str, Any]") -> None:
        from gpuboard.agent import signals  # late: rarely needed

        try:
            if self.probe.source == "simulated":  # its pids may be those of real processes
                raise signals.SignalRefused("not-found", "that process is simulated")
            self.channel.reply(call_id, signals.send(args, self.processes))
        except signals.SignalRefused as refused:
            self.channel.refuse(call_id, refused.kind, refused.message)

    def _pids_on(self, uuids: "Any") -> "Any":
        pids: "Set[int]" = set()
        for reading in self.probe.readings(time.monotonic(), lambda pid, kind, memory: pid):
            for part in [reading] + list(reading.get("mig", ())):
                if (
                    part["uuid"] in uuids and self.probe.source != "simulated"
                ):  # its pids may be those of real processes
                    pids.update(part.get("processes") or ())
        return pids

    def _tick(self, now: float) -> None:
        if self.interval_s:
            missed = int((now - (self.due or now)) / self.interval_s)  # after a suspend: no burst
            self.due = (self.due or now) + (missed + 1) * self.interval_s
        else:
            self.due = None
        if self.channel.pending > BACKLOG or self.wanted is not None:
            return
        if not self.probe.period_s or self.probe.error is not None:
            self.wanted = (self.probe.ask(), now + min(LATE_S, self.interval_s or LATE_S))
        elif not self.probe.resting(now):
            self.probe.ask()  # its values are sent when complete
        elif now > self.sent_at + min(self.probe.period_s, OLD_S) + self.probe.slow_s:
            self.wanted = (self.probe.done, now)  # resend the last values with their age

    def _send_what_is_ready(self, now: float) -> None:
        done, failed, slow_s = self.probe.done, self.probe.error is not None, self.probe.slow_s
        ticket = self.wanted is not None and (done >= self.wanted[0] or failed or now >= self.wanted[1] + slow_s)
        answered = [read for read in self.reads if done >= read[1] or failed or now >= read[2] + slow_s]
        came = bool(self.probe.period_s and self.interval_s) and done > self.sent_done
        if not ticket and not answered and not came:
            return
        if ticket:
            self.wanted = None
        self._reading(now)
        for call_id, number, _ in answered:
            if done >= number:
                self.channel.reply(call_id, {"seq": self.seq})
            else:
                message = self.probe.error or "%s has not answered for %.0f s" % (self._source(), READ_S + slow_s)
                self.channel.refuse(call_id, "nvml", message)
        self.reads = [read for read in self.reads if read not in answered]

    def _reading(self, now: float) -> None:
        statics, job_error = self.probe.statics(), None
        if self.job is not None:
            statics, job_error = self.job.only(statics)
        host, shared = self.host.reading(), terms.sharing(statics)
        statics = terms.lent(statics, shared, "memory_total", host["memory_total"])
        if self.probe.version != self.sent_version or self.seq == 0:
            self.sent_version = self.probe.version
            self.channel.send(
                {
                    "t": "static",
                    "gpus": statics,
                    "driver": self.probe.driver,
                    "cuda": self.probe.cuda,
                    "source": self.probe.source,
                }
            )
        self.seq += 1
        self.sent_done, self.sent_at = self.probe.done, now
        if self.seq == 1:
            self.procfs.be_gentle()  # only now: a user waits for the first reading
        alive: "Set[int]" = set()

        def describe(pid: int, kind: str, memory: "Optional[int]") -> "Dict[str, Any]":
            alive.add(pid)
            return self.processes.describe(pid, kind, memory)

        gpus = self.probe.readings(now, describe)
        if self.job is not None:
            gpus = self.job.readings(gpus, statics)
        if self.probe.source != "simulated":
            gpus = [self._with_loads(gpu) for gpu in gpus]
        self.processes.forget(alive)
        claims, claims_error = self.folder.read()
        message = {
            "t": "reading",
            "seq": self.seq,
            "at": time.time(),
            "interval_s": max(self.interval_s, self.probe.period_s) if self.interval_s else 0.0,
            "gpus": terms.lent(gpus, shared, "memory_used", host["memory_used"]),
            "nvml_error": self.probe.error
            or (job_error if self.probe.done else "%s has not answered yet" % self._source()),
            "claims": claims,
            "claims_error": claims_error,
        }
        message.update(host)
        if self.traffic is not None:
            message.update(self.traffic.reading())
        self.channel.send(self.deltas.shortened(message) if self.deltas else message)

    def _with_loads(self, gpu: "Dict[str, Any]") -> "Dict[str, Any]":
        percents = gpu.pop("sm_percents", {})
        pids = [process["pid"] for process in gpu.get("processes") or ()]
        return dict(gpu, loads=[[percents.get(pid), *self.processes.load(pid)] for pid in pids]) if pids else gpu

    def _source(self) -> str:
        return "nvidia-smi" if self.probe.source == "nvidia-smi" else "NVML"


def hello(user: str) -> "Dict[str, Any]":
    """Return the agent's first message."""
    from gpuboard.agent import proc  # late: after the NVML process was started

    return {
        "t": "hello",
        "hostname": os.uname().nodename,
        "boot_id": proc.boot_id(),
        "uid": os.getuid(),
        "user": user,
        "pid": os.getpid(),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "addresses": addresses(),
        "job": job(),
        "shm_free": shm_free(),
        "ptrace_scope": proc.ptrace_scope(),
    }


def shm_free() -> "Optional[int]":
    """Return the free bytes of /dev/shm; None without one."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def job() -> "Optional[str]":
    """Return the Slurm job that this agent belongs to: a step's, or the one that adopted its sshd."""
    from gpuboard.agent import proc  # late: after the NVML process was started

    try:
        return proc.parse_cgroup(proc.read("/proc/self/cgroup").decode("utf-8", "replace"))[0]
    except OSError:
        return None


def addresses() -> "List[str]":
    """Return this host's own addresses, IPv4 first, without loopback and link-local ones (from /proc/net).

    Those of IPv6 have all their digits: what shortens them, ``socket``, takes 4 ms to import.
    """
    from gpuboard.agent import proc  # late: after the NVML process was started

    found = [address for address in proc.ipv4_addresses() if not address.startswith("127.")]
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, _, _, scope = line.split()[:4]
                if scope == "00":  # global
                    found.append(":".join(digits[at : at + 4] for at in range(0, 32, 4)))
    except OSError:
        pass  # no IPv6, or a /proc without it
    return found
