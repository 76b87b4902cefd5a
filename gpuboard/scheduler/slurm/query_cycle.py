"""One query cycle: `scontrol show job`, `scontrol show node`, and if needed one more command."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from gpuboard.model.schedule import Schedule
from gpuboard.model.text import clean
from gpuboard.scheduler.slurm import consistency, messages
from gpuboard.scheduler.slurm.jobs import TRUE_JOB, TrueJob, jobs, true_jobs
from gpuboard.scheduler.slurm.nodes import Reservation, nodes, reservations
from gpuboard.scheduler.slurm.records import Unreadable
from gpuboard.scheduler.slurm.site import Site, environment, settings, which
from gpuboard.transport.command import Ran, run

PROBE_S = 2.0  # timeout of `scontrol ping`, which takes 6 ms
STOP_S = 0.15  # longest wait for the end of a command that was stopped
# All partitions, hidden and forbidden ones too; in a federation only this cluster; one record per line.
_SHOW = ("--all", "--local", "--oneliner", "--details", "show")


class CycleResult(NamedTuple):
    """The result of a cycle."""

    schedule: Schedule | None
    error: str | None = None  # why there is none
    contact: bool = False  # the failure is that the controller was not reached


class _FailedError(Exception):
    """A command failed; ``contact``: it did not reach the controller."""

    def __init__(self, text: str, *, contact: bool = False) -> None:
        super().__init__(text)
        self.contact = contact


class QueryCycle:
    """Queries the Slurm of one site. For one thread at a time, except ``stop``."""

    def __init__(self, site: Site, env: Mapping[str, str]) -> None:
        self.took_s = 0.0  # in Slurm's commands, in the newest cycle
        self._site = site
        self._env = environment(env)
        self._stopped = threading.Event()
        self._running = threading.Lock()  # held while a command runs

    def stop(self) -> None:
        """Stop the running command and start no other; waits a moment for its end."""
        self._stopped.set()
        if self._running.acquire(timeout=STOP_S):
            self._running.release()

    def ask(self, timeout_s: float, *, probe: bool, before: Schedule | None) -> CycleResult:
        """Query, for at most ``timeout_s`` in all. ``probe``: only if the controller answers `scontrol ping`.

        ``before``: the previous answer; its reservations are used where they are not queried again.
        """
        self.took_s = 0.0
        until = time.monotonic() + timeout_s
        if missing := messages.missing(self._site):
            return CycleResult(None, missing)
        try:
            if probe:
                self._ping(min(until, time.monotonic() + PROBE_S))
            return CycleResult(self._ask(until, third=not probe, before=before))
        except _FailedError as error:
            return CycleResult(None, str(error), error.contact)
        except Unreadable as error:
            return CycleResult(None, f"Slurm's answer cannot be read: {error}")

    def _ask(self, until: float, *, third: bool, before: Schedule | None) -> Schedule:
        """Return Slurm's answer. ``third``: a third command may be run. Raises _FailedError, Unreadable."""
        at = time.time()
        pieces = jobs(self._scontrol("job", until))
        listed = nodes(self._scontrol("node", until))
        held = [piece.job for piece in pieces if piece.job is not None]
        notes = consistency.contradictions(pieces, listed)
        reserved: list[Reservation] | None = None
        truth: dict[int, TrueJob] = {}
        try:
            if notes and third:
                truth = true_jobs(self._squeue(until))
                held, notes = consistency.corrected(pieces, truth, listed)
            elif third and consistency.is_reserved(listed):
                reserved = reservations(self._scontrol("reservation", until))
        except (_FailedError, Unreadable) as error:  # the answer is usable without it
            notes = [*notes, str(error)]
        if reserved is None:
            reserved = consistency.reserved_before(before, listed)
        cluster = clean(settings(self._site).get("clustername", ""), 64)
        visited = consistency.visited(pieces, held, truth, os.geteuid())
        return Schedule(at, cluster, consistency.joined(held, listed, reserved), tuple(held), visited, tuple(notes))

    def _scontrol(self, what: str, until: float) -> str:
        return self._run([*_SHOW, what], until)

    def _squeue(self, until: float) -> str:
        squeue = which("squeue", self._env)
        if squeue is None:
            raise _FailedError("squeue is not on PATH; it is needed to check contradictory jobs")
        return self._run(["--all", "--local", "--noheader", "--states=all", f"--format={TRUE_JOB}"], until, squeue)

    def _ping(self, until: float) -> None:
        done = self._done(["ping"], until, self._site.scontrol or "")
        if " is UP" not in done.out:
            failed = done._replace(err=messages.DOWN) if done.ended else done
            raise _FailedError(messages.failure(failed, self._site), contact=True)

    def _run(self, argv: list[str], until: float, program: str = "") -> str:
        """Return what a command prints, by default `scontrol`. Raises _FailedError."""
        done = self._done(argv, until, program or self._site.scontrol or "")
        if not done.ok:
            raise _FailedError(messages.failure(done, self._site), contact=messages.is_contact(done))
        return done.out

    def _done(self, argv: list[str], until: float, program: str) -> Ran:
        try:
            with self._running:
                left_s = max(0.05, until - time.monotonic())
                done = run([program, *argv], self._env, left_s, stopped=self._stopped)
        except OSError as error:
            raise _FailedError(f"{program} cannot be run: {error.strerror or error}") from None
        self.took_s += done.took_s
        return done
