"""NVML's process: starts it, asks it, replaces it when a call hangs, and stamps what it said with its age.

Where there is no NVML it is nvidia-smi that the process asks (gpuboard/agent/smi/process.py), less often.

When a call on GPU k hangs, the process is killed and one without k is started, while GPU k is tried alone, with
back-off; its last values go out with a growing age meanwhile. A process that cannot be killed (a call into the driver
that does not return) is not waited for, and no second one is started for the same GPU.
"""

import os
import time

from gpuboard.agent.nvml.process import SIGKILL, NvmlProcess, spawn
from gpuboard.agent.nvml.terms import XIDS, pause_s

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple

CALL_S = 2.0  # a GPU that is silent for so long hangs; without the persistence daemon its first call may take 1 s
START_S = 10.0  # the same for NVML as a whole
RETRY_S = (5.0, 60.0)  # first and longest wait before another attempt
RELAPSE_S = 120.0  # a GPU that hangs again so soon goes on where its back-off was
FRESH_S = 60.0  # a GPU that fails is looked at with a newly started NVML so often
XIDS_KEPT = 8  # of a GPU, the newest
HANGING_S = 3.0  # so much longer may a first answer take where NVML has begun: one GPU may hang, and the node be busy
SMI_S = 5.0  # nvidia-smi may take so much longer than NVML to a first answer
_EARLY_S = 0.25  # ticks are aligned to the clock; a pass may come so much before its time to keep to them
_POLL_S = 0.25  # how often a busy process is looked at for progress


class _Stuck:
    """A GPU whose calls hang."""

    def __init__(self, now: float, corpse: "Optional[int]", words: str, before: "Optional[_Stuck]") -> None:
        self.wait_s = RETRY_S[0]
        if before is not None and now - before.retry_at < RELAPSE_S:
            self.wait_s = min(2 * before.wait_s, RETRY_S[1])
        self.limit_s = CALL_S
        self.retry_at: float = now + self.wait_s
        self.corpse = corpse  # a process that has not ended yet though it was killed
        self.words = words

    def again(self, now: float, corpse: "Optional[int]") -> None:
        self.wait_s = min(2 * self.wait_s, RETRY_S[1])
        self.limit_s = min(2 * self.limit_s, START_S)  # perhaps it is only slow
        self.retry_at = now + self.wait_s
        self.corpse = corpse


class Probe:
    """The GPUs of this node as NVML shows them, whatever NVML does; as nvidia-smi does where NVML cannot be loaded.

    ``done`` counts completed passes over the GPUs; ``ask`` returns the number of the next one that starts. ``version``
    changes when the static facts do. ``error`` says why NVML as a whole gives nothing.
    """

    def __init__(self, keep_out: "Tuple[int, ...]" = ()) -> None:
        self.keep_out = keep_out  # descriptors that no NVML process may hold: the connection
        self.source = "nvml"  # or "nvidia-smi"
        self.slow_s = 0.0  # how much longer than usual an answer may take
        self.period_s = 0.0  # how far apart its passes are, at least, but those that somebody asks for
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
        self._began = 0.0  # when the newest pass did
        self._again = False  # somebody asked while a pass was under way
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._corpses: "Set[int]" = set()
        self._wedged: "Optional[int]" = None  # a corpse that hangs in NVML's start
        self._facts: "Dict[int, Dict[str, Any]]" = {}
        self._values: "Dict[int, Tuple[Dict[str, Any], float]]" = {}
        self._xids: "Dict[str, List[Dict[str, Any]]]" = {}  # by UUID, newest first; they outlive NVML's process
        self._deaf = False  # to listen for them was more than this driver can take

    def start(self) -> int:
        """Start the NVML process, which makes a first pass by itself; return that pass's number."""
        self._main = self._spawn(set(self.stuck) | ({XIDS} if self._deaf else set()), None)
        self._started += 1
        self._began = time.monotonic()
        self._again = False  # what was asked for earlier, this pass answers
        return self._started

    def stop(self) -> None:
        """Kill what was started; waits for nothing."""
        for child in (self._main, self._trial):
            if child is not None:
                self._kill(child)
        self._main = self._trial = None

    def fds(self) -> "List[int]":
        """Return the descriptors to poll for reading."""
        return [child.fd_in for child in (self._main, self._trial) if child is not None]

    def pids(self) -> "List[int]":
        """Return the NVML processes."""
        return [child.pid for child in (self._main, self._trial) if child is not None] + list(self._corpses)

    def ask(self) -> int:
        """Ask for a pass; return the number that ``done`` has reached once one is complete that starts from now on."""
        if self._main is None:
            return self._started + 1
        if self._main.busy:
            self._again = True
            return self._started + 1
        self._started += 1
        self._began = time.monotonic()
        self._main.ask(self._began)
        return self._started

    def resting(self, now: float) -> bool:
        """Return whether a tick should not ask for a pass yet: one of nvidia-smi costs too much to be made at each."""
        if not self.period_s or self._main is None:
            return False
        return self._main.busy or now < self._began + self.period_s - _EARLY_S

    def on_readable(self, fd: int) -> None:
        """Take in what the process behind ``fd`` has said."""
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
        """Kill what hangs and start what is due; return when to call again (monotonic seconds), None: no need."""
        self._reap()
        if self._main is not None and self._main.busy:
            at = self._main.at()
            silent_s = self._main.silent_s(now, START_S if at is None else CALL_S)
            if silent_s:
                self._main_hangs(at, silent_s, now)
        if self._main is None and now >= self._retry_at and self._wedged not in self._corpses:
            self.start()
        if self._trial is not None:
            stuck = self.stuck[self._trial_of]
            if self._trial.silent_s(now, stuck.limit_s):
                child, self._trial = self._trial, None
                stuck.again(now, self._kill(child))
        elif self._main is not None:
            for k, stuck in self.stuck.items():
                if now >= stuck.retry_at and stuck.corpse not in self._corpses:
                    self._trial_of, self._trial = k, self._spawn(set(), k)
                    break
        return self._next(now)

    def statics(self) -> "List[Dict[str, Any]]":
        """Return the GpuStatic of every GPU; one that was never readable has a name that says so."""
        return [self._facts.get(k) or self._unread(k) for k in range(self.count or 0)]

    def readings(self, now: float, describe: "Callable[[int, str, Optional[int]], Any]") -> "List[Dict[str, Any]]":
        """Return the GpuReading of every GPU; ``describe`` turns pid, type and memory into a Process."""
        return [self._reading(k, now, describe) for k in range(self.count or 0)]

    def _reading(self, k: int, now: float, describe: "Callable[..., Any]") -> "Dict[str, Any]":
        uuid = (self._facts.get(k) or self._unread(k))["uuid"]
        if k not in self._values:
            words = self.stuck[k].words if k in self.stuck else "not read yet"
            return {"uuid": uuid, "error": words}
        values, at = self._values[k]
        reading = dict(values, uuid=uuid)
        if uuid in self._xids:
            reading["xids"] = self._xids[uuid]
        if now - at >= 0.05:
            reading["delay_s"] = round(now - at, 2)
        _describe(reading, describe)
        reading["mig"] = [_describe(dict(device), describe) for device in reading.get("mig", ())]
        return reading

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
                self._paced(message[5])
                self._counted(message[4])
                if self.source == "nvml" and not self.done:
                    self.slow_s = HANGING_S
        elif message[0] == "slow":
            self._paced(message[1])
        elif message[0] == "again":
            self._restart()
        elif message[0] == "static":
            self._learn(message[1])
        elif self._main is not None:
            for k, values in message[1].items():
                self._values[k] = (values, now - message[3])
            self._hear(message[2])
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

    def _paced(self, source: str) -> None:
        self.source = source
        self.slow_s, self.period_s = (0.0, 0.0) if source == "nvml" else (SMI_S, max(self.period_s, pause_s(0.0)))

    def _counted(self, count: int) -> None:
        """NVML's indexes mean other GPUs when there is another number of them: nothing known by index holds then."""
        if self.count is not None and self.count != count:
            self._facts, self._values = {}, {}
            if self.stuck:
                self.stuck = {}
                self._restart()
        self.count = count
        self.version += 1

    def _restart(self) -> None:
        child, self._main = self._main, None  # first: a fork closes the descriptors of the processes we have
        if child is not None:
            self._kill(child)
        self.start()

    def _learn(self, facts: "Dict[int, Dict[str, Any]]") -> None:
        before = dict(self._facts)
        for k, fact in facts.items():
            known = self._facts.get(k)
            if "error" in fact:
                continue  # no handle: what was known of it still holds
            if self.stuck and known is not None and known["uuid"] == fact["uuid"]:
                fact = dict(known, mig=fact.get("mig"))  # noqa: PLW2901 - links to a GPU that hangs are not forgotten
            self._facts[k] = fact
        if self._facts != before:
            self.version += 1

    def _hear(self, xids: "Dict[int, List[Tuple[int, float]]]") -> None:
        for k, new in xids.items():
            uuid = (self._facts.get(k) or self._unread(k))["uuid"]
            told = [{"code": code, "at": round(at, 3)} for code, at in reversed(new)]
            self._xids[uuid] = (told + self._xids.get(uuid, []))[:XIDS_KEPT]

    def _do_without_xids(self) -> None:
        self._deaf = True
        self._xids = {}
        self.start()

    def _main_hangs(self, at: "Optional[int]", silent_s: float, now: float) -> None:
        child, self._main = self._main, None
        assert child is not None
        corpse = self._kill(child)
        if at is None:
            self.error = "NVML does not answer: a call has not returned for %.0f s" % silent_s
            self._wedged = corpse
            self._later(now)
            return
        if at == XIDS:
            self._do_without_xids()
            return
        self._leave_out(at, corpse, "NVML hangs: a call on this GPU has not returned for %.0f s" % silent_s, now)

    def _leave_out(self, k: int, corpse: "Optional[int]", words: str, now: float) -> None:
        self.stuck[k] = self._past[k] = _Stuck(now, corpse, words, self._past.get(k))
        self.version += 1
        self.start()

    def _main_ended(self, now: float) -> None:
        child, self._main = self._main, None
        assert child is not None
        at = child.at()
        self._kill(child)
        if self.error is not None:
            self._later(now)
        elif at == XIDS:
            self._do_without_xids()
        elif at is not None:  # it crashed in the driver's library while it read this GPU
            self._leave_out(at, None, "NVML crashed while it read this GPU", now)
        else:
            self.error = "the process that reads NVML has ended"
            self._later(now)

    def _trial_ended(self, answers: "List[Dict[int, Any]]", now: float) -> None:
        child, self._trial = self._trial, None
        assert child is not None
        corpse = self._kill(child)
        if not answers:  # it crashed, or NVML as a whole gives nothing
            self.stuck[self._trial_of].again(now, corpse)
            return
        for k, values in answers[-1].items():
            self._values[k] = (values, now)
        del self.stuck[self._trial_of]
        self.version += 1
        self._restart()

    def _later(self, now: float) -> None:
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
        for pid in list(self._corpses):
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    self._corpses.discard(pid)
            except OSError:
                self._corpses.discard(pid)

    def _kill(self, child: NvmlProcess) -> int:
        child.close()
        os.kill(child.pid, SIGKILL)  # not reaped yet, so the pid is still its own
        self._corpses.add(child.pid)
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
