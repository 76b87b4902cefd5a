"""Supervises the NVML process: starts it, requests passes, replaces it when a call hangs, and ages its values.

Without NVML the process runs nvidia-smi instead (gpuboard/agent/smi/process.py), less often.

When a call on GPU k hangs, the process is killed and replaced by one that skips k. GPU k is then retried in a process
of its own, with back-off; until one succeeds its last values are sent with a growing age and the error. A process that
cannot be killed (a call into the driver does not return) is not waited for, and no second one is started for the same
GPU.
"""

import os
import time

from gpuboard.agent.nvml.process import SIGKILL, NvmlProcess, spawn
from gpuboard.agent.nvml.terms import NO_GPU, RATES, XIDS, pause_s

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Literal, Optional, Set, Tuple  # novm

    Source = Literal["nvml", "nvidia-smi"]

CALL_S = 2.0  # timeout of calls on one GPU; without the persistence daemon the first one may take 1 s
START_S = 10.0  # timeout of starting NVML
RETRY_S = (5.0, 60.0)  # back-off: first and longest wait
RELAPSE_S = 120.0  # a GPU that hangs again within this time continues its back-off
FRESH_S = 60.0  # while a GPU fails, NVML is restarted at this interval
XIDS_KEPT = 8  # newest errors kept per GPU
LOOK_S = 15.0  # what a call of `look` asks for is measured for this long
HANGING_S = 3.0  # added to the first answer's deadline once NVML has started: a GPU may hang on a busy node
SMI_S = 5.0  # added to the deadline for nvidia-smi
_EARLY_S = 0.25  # a pass may start this early, to stay aligned with the ticks
_POLL_S = 0.25  # interval of the checks of a busy process for progress
_HANGS = "NVML hangs: a call on this GPU %s"


class _Stuck:
    """A GPU whose calls hang, and its back-off."""

    def __init__(
        self, now: float, killed_pid: "Optional[int]", error: str, stalled_s: float, before: "Optional[_Stuck]"
    ) -> None:
        self.wait_s = RETRY_S[0]
        if before is not None and now - before.retry_at < RELAPSE_S:
            self.wait_s = min(2 * before.wait_s, RETRY_S[1])
        self.limit_s = CALL_S
        self.retry_at: float = now + self.wait_s
        self.killed_pid = killed_pid  # pid of a process that was killed and may not have ended
        self.error = error
        self.stalled_s = stalled_s  # how long the call that hung was waited for; 0: it crashed

    def back_off(self, now: float, killed_pid: "Optional[int]") -> None:
        self.wait_s = min(2 * self.wait_s, RETRY_S[1])
        self.limit_s = min(2 * self.limit_s, START_S)  # it may only be slow
        self.retry_at = now + self.wait_s
        self.killed_pid = killed_pid


class Probe:
    """The GPUs of this node by NVML, or by nvidia-smi where NVML cannot be loaded. Never blocks, even if NVML hangs.

    ``done`` counts completed passes over the GPUs; ``ask`` returns the number of the next one that starts. ``version``
    changes with the static facts. ``error``: why NVML as a whole fails.
    """

    def __init__(self, keep_out: "Tuple[int, ...]" = (), *, rates: bool = False) -> None:
        self.keep_out = keep_out  # descriptors to close in NVML processes: the connection's
        self.rates = rates  # whether every pass but the first measures them
        self.source: "Source" = "nvml"
        self.slow_s = 0.0  # added to the usual deadlines
        self.period_s = 0.0  # shortest period of passes by tick; calls of `read` are exempt
        self.driver: "Optional[str]" = None
        self.cuda: "Optional[str]" = None
        self.error: "Optional[str]" = None
        self.version = 0
        self.done = 0
        self.count: "Optional[int]" = None
        self.stuck: "Dict[int, _Stuck]" = {}
        self._past: "Dict[int, _Stuck]" = {}
        self._main: "Optional[NvmlProcess]" = None
        self._trial: "Optional[NvmlProcess]" = None
        self._trial_of = -1
        self._started = 0
        self._began = 0.0  # when the newest pass started
        self._again = False  # another pass was requested during this one
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._killed: "Set[int]" = set()
        self._hangs_in_start: "Optional[int]" = None  # pid of a killed process
        self._facts: "Dict[int, Dict[str, Any]]" = {}
        self._values: "Dict[int, Tuple[Dict[str, Any], float]]" = {}
        self._xids: "Dict[str, List[Dict[str, Any]]]" = {}  # by UUID, newest first; outlives the NVML process
        self._without: "Set[int]" = set()  # of XIDS and RATES, what hung or crashed the driver
        self._looked: "Tuple[Optional[str], float]" = (None, 0.0)  # UUID, until when (monotonic)

    def start(self) -> int:
        """Start the NVML process, which begins with a pass; return the number of that pass."""
        self._main = self._spawn(set(self.stuck) | self._without, None)
        self._started += 1
        self._began = time.monotonic()
        self._again = False  # this pass serves earlier requests
        return self._started

    def stop(self) -> None:
        """Kill the processes without waiting for their end."""
        for child in (self._main, self._trial):
            if child is not None:
                self._kill(child)
        self._main = self._trial = None

    def fds(self) -> "List[int]":
        """Return the descriptors to poll for reading."""
        return [child.fd_in for child in (self._main, self._trial) if child is not None]

    def pids(self) -> "List[int]":
        """Return the pids of the NVML processes."""
        return [child.pid for child in (self._main, self._trial) if child is not None] + list(self._killed)

    def ask(self) -> int:
        """Request a pass; when ``done`` reaches the returned number, one that started after this call is complete."""
        if self._main is None:
            return self._started + 1
        if self._main.busy:
            self._again = True
            return self._started + 1
        self._started += 1
        self._began = time.monotonic()
        uuid, until = self._looked
        if self._began >= until:
            self._main.ask(self._began, self.rates, NO_GPU)
        else:
            looked = [k for k, fact in self._facts.items() if fact["uuid"] == uuid]
            self._main.ask(self._began, True, looked[0] if looked else NO_GPU)
        return self._started

    def look(self, uuid: "Optional[str]") -> None:
        """Measure rates for LOOK_S, and the throughput of this GPU; it takes the place of the last one."""
        self._looked = (uuid, time.monotonic() + LOOK_S)

    def resting(self, now: float) -> bool:
        """Return whether a tick should request no pass yet: nvidia-smi is too expensive to run at every tick."""
        if not self.period_s or self._main is None:
            return False
        return self._main.busy or now < self._began + self.period_s - _EARLY_S

    def on_readable(self, fd: int) -> None:
        """Handle the messages of the process behind ``fd``."""
        now = time.monotonic()
        if self._main is not None and fd == self._main.fd_in:
            messages, ended = self._main.receive()
            for message in messages:
                self._take(message, now)
            if ended:
                self._main_ended(now)
        elif self._trial is not None and fd == self._trial.fd_in:
            messages, ended = self._trial.receive()
            answers = [message[1] for message in messages if message[0] == "pass"]
            if answers or ended:
                self._trial_ended(answers, now)

    def check(self, now: float) -> "Optional[float]":
        """Kill what hangs and start what is due; return when to call again (monotonic s), None: on events only."""
        self._reap()
        if self._main is not None and self._main.busy:
            at = self._main.at()
            stalled_s = self._main.stalled_s(now, START_S if at is None else CALL_S)
            if stalled_s:
                self._main_hangs(at, stalled_s, now)
        if self._main is None and now >= self._retry_at and self._hangs_in_start not in self._killed:
            self.start()
        if self._trial is not None:
            stuck = self.stuck[self._trial_of]
            if self._trial.stalled_s(now, stuck.limit_s):
                child, self._trial = self._trial, None
                stuck.back_off(now, self._kill(child))
        elif self._main is not None:
            for k, stuck in self.stuck.items():
                if now >= stuck.retry_at and stuck.killed_pid not in self._killed:
                    self._trial_of, self._trial = k, self._spawn(set(), k)
                    break
        return self._next(now)

    def statics(self) -> "List[Dict[str, Any]]":
        """Return the GpuStatic of every GPU; a placeholder for one that was never readable."""
        return [self._facts.get(k) or self._unread(k) for k in range(self.count or 0)]

    def readings(self, now: float, describe: "Callable[[int, str, Optional[int]], Any]") -> "List[Dict[str, Any]]":
        """Return the GpuReading of every GPU; ``describe`` turns pid, type and memory into a Process."""
        return [self._reading(k, now, describe) for k in range(self.count or 0)]

    def _reading(self, k: int, now: float, describe: "Callable[..., Any]") -> "Dict[str, Any]":
        uuid = (self._facts.get(k) or self._unread(k))["uuid"]
        if k not in self._values:
            return {"uuid": uuid, "error": self._unread_words(k)}
        values, at = self._values[k]
        reading = dict(values, uuid=uuid)
        if uuid in self._xids:
            reading["xids"] = self._xids[uuid]
        if k in self.stuck and not reading.get("lost"):  # the error of a lost GPU says why it is lost
            reading["error"] = self.stuck[k].error
        if now - at >= 0.05:
            reading["delay_s"] = round(now - at, 2)
        _describe(reading, describe)
        reading["mig"] = [_describe(dict(device), describe) for device in reading.get("mig", ())]
        return reading

    def _unread_words(self, k: int) -> str:
        """Return why a GPU has no values. Without values no ``delay_s`` is sent: the text has the time."""
        if k not in self.stuck:
            return "not read yet"
        stuck = self.stuck[k]
        return _HANGS % ("has not returned for %.0f s" % stuck.stalled_s) if stuck.stalled_s else stuck.error

    def _unread(self, k: int) -> "Dict[str, Any]":
        return {
            "index": k,
            "uuid": "unread-%s-%d" % (os.uname().nodename, k),
            "name": "GPU that cannot be read",
            "pci_bus_id": "",
        }

    def _take(self, message: "Tuple[Any, ...]", now: float) -> None:
        if message[0] == "init":
            self.error = message[1]
            if self.error is None:
                self.driver, self.cuda = message[2], message[3]
                self._set_source(message[5])
                self._set_count(message[4])
                if self.source == "nvml" and not self.done:
                    self.slow_s = HANGING_S
        elif message[0] == "slow":
            self._set_source(message[1])
        elif message[0] == "again":
            self._restart()
        elif message[0] == "static":
            self._store_facts(message[1])
        elif self._main is not None:
            for k, values in message[1].items():
                self._values[k] = (values, now - message[3])
            self._add_xids(message[2])
            self._main.busy = False
            if self.source == "nvml":
                self.slow_s = 0.0
            else:
                self.period_s = pause_s(message[3])
            self.done = self._started
            self._retry_s = RETRY_S[0]
            failing = any("error" in values for values in message[1].values())
            if failing and self.source == "nvml" and now - self._main.born > FRESH_S:
                self._restart()
            elif self._again:
                self._again = False
                self.ask()

    def _set_source(self, source: "Source") -> None:
        self.source = source
        self.slow_s, self.period_s = (0.0, 0.0) if source == "nvml" else (SMI_S, max(self.period_s, pause_s(0.0)))

    def _set_count(self, count: int) -> None:
        """Store the number of GPUs. When it changes, indexes denote other GPUs: drop everything stored by index."""
        if self.count is not None and self.count != count:
            self._facts, self._values = {}, {}
            if self.stuck:
                self.stuck = {}
                self._restart()
        self.count = count
        self.version += 1

    def _restart(self) -> None:
        child, self._main = self._main, None  # cleared first: the fork closes the descriptors of live processes
        if child is not None:
            self._kill(child)
        self.start()

    def _store_facts(self, facts: "Dict[int, Dict[str, Any]]") -> None:
        before = dict(self._facts)
        for k, fact in facts.items():
            known = self._facts.get(k)
            if "error" in fact:
                continue  # no handle: keep the known facts
            failed = fact.pop("failed", False)
            if known is not None and known["uuid"] == fact["uuid"]:
                if failed:  # the facts of this call and of later ones are unknown
                    fact = {name: value for name, value in fact.items() if value}  # noqa: PLW2901
                if self.stuck:  # keep links to a GPU that hangs
                    fact = {name: fact[name] for name in ("mig",) if name in fact}  # noqa: PLW2901
                fact = dict(known, **fact)  # noqa: PLW2901
            elif known is not None:
                self._values.pop(k, None)  # those of another GPU
            self._facts[k] = fact
        if self._facts != before:
            self.version += 1

    def _add_xids(self, xids: "Dict[int, List[Tuple[int, float]]]") -> None:
        for k, new in xids.items():
            uuid = (self._facts.get(k) or self._unread(k))["uuid"]
            added = [{"code": code, "at": round(at, 3)} for code, at in reversed(new)]
            self._xids[uuid] = (added + self._xids.get(uuid, []))[:XIDS_KEPT]

    def _do_without(self, what: int) -> None:
        self._without.add(what)
        if what == XIDS:
            self._xids = {}
        self.start()

    def _main_hangs(self, at: "Optional[int]", stalled_s: float, now: float) -> None:
        child, self._main = self._main, None
        assert child is not None
        killed_pid = self._kill(child)
        if at is None:
            self.error = "NVML hangs: a call has not returned for %.0f s" % stalled_s
            self._hangs_in_start = killed_pid
            self._retry_later(now)
            return
        if at in (XIDS, RATES):
            self._do_without(at)
            return
        self._leave_out(at, killed_pid, _HANGS % "does not return", stalled_s, now)

    def _leave_out(self, k: int, killed_pid: "Optional[int]", error: str, stalled_s: float, now: float) -> None:
        self.stuck[k] = self._past[k] = _Stuck(now, killed_pid, error, stalled_s, self._past.get(k))
        self.version += 1
        self.start()

    def _main_ended(self, now: float) -> None:
        child, self._main = self._main, None
        assert child is not None
        at = child.at()
        self._kill(child)
        if self.error is not None:
            self._retry_later(now)
        elif at in (XIDS, RATES):
            self._do_without(at)
        elif at is not None:  # it crashed in the driver's library
            self._leave_out(at, None, "NVML crashed while it read this GPU", 0.0, now)
        else:
            self.error = "the process that reads NVML has ended"
            self._retry_later(now)

    def _trial_ended(self, answers: "List[Dict[int, Any]]", now: float) -> None:
        child, self._trial = self._trial, None
        assert child is not None
        killed_pid = self._kill(child)
        if not answers:  # it crashed, or NVML as a whole fails
            self.stuck[self._trial_of].back_off(now, killed_pid)
            return
        for k, values in answers[-1].items():
            self._values[k] = (values, now)
        del self.stuck[self._trial_of]
        self.version += 1
        self._restart()

    def _retry_later(self, now: float) -> None:
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    def _next(self, now: float) -> "Optional[float]":
        times = [stuck.retry_at for stuck in self.stuck.values()]
        if self._main is None:
            times.append(self._retry_at)
        if self._trial is not None or (self._main is not None and self._main.busy):
            times.append(now + _POLL_S)
        return max(min(times), now + 0.05) if times else None

    def _reap(self) -> None:
        for pid in list(self._killed):
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    self._killed.discard(pid)
            except OSError:
                self._killed.discard(pid)

    def _kill(self, child: NvmlProcess) -> int:
        child.close()
        os.kill(child.pid, SIGKILL)  # not reaped yet, so the pid is still its own
        self._killed.add(child.pid)
        self._reap()
        return child.pid

    def _spawn(self, skip: "Set[int]", only: "Optional[int]") -> NvmlProcess:
        close = list(self.keep_out)
        for other in (self._main, self._trial):
            if other is not None:
                close += [other.fd_in, other.fd_out]
        return spawn(time.monotonic(), close, skip, only)


def _describe(values: "Dict[str, Any]", describe: "Callable[..., Any]") -> "Dict[str, Any]":
    processes = values.get("processes")
    if processes is not None:
        values["processes"] = [describe(pid, kind, memory) for pid, kind, memory in processes]
    return values
