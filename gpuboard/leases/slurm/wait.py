"""From a submitted job to one that runs, or the reason why it does not: few questions, fewer the longer it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuboard.errors import GpuboardError, NeverPossible, NoNodeReached, NotFree
from gpuboard.model.request import Refusal
from gpuboard.model.text import clean
from gpuboard.model.units import day_time, format_duration
from gpuboard.scheduler.slurm.client import Jobs, JobState, QueuePlace
from gpuboard.scheduler.slurm.sbatch_args import is_undecided, never_reason

_FIRST_POLL_S = 0.1
_POLL_MAX_S = 30.0
_GROWTH = 1.4
_SHARE = 20  # the pause is at least so many times what the last answer took
_QUIET_S = 1.0  # most jobs that can start have started by then
_DECIDED_S = 1.0  # a job that has just been submitted may get a reason that is out of date in the next second


class Waiting:
    """Waits for one job. ``wait_s``: how long (inf: for ever), None: only for Slurm to make up its mind."""

    def __init__(
        self,
        jobs: Jobs,
        number: int,
        wait_s: float | None,
        patience_s: float,
        *,
        progress: Callable[[str], None],
        each: Callable[[], None],
    ) -> None:
        """``each`` is called before every question: whoever gave up raises there."""
        self._jobs = jobs
        self._number = number
        self._wait_s = wait_s
        self._patience_s = patience_s
        self._progress = progress
        self._each = each
        self._started = time.monotonic()

    def run(self) -> JobState:
        """Return the job when it runs.

        Raises NotFree and NeverPossible with Slurm's reason, NoNodeReached, and GpuboardError for a job that ended.
        """
        pause_s = _FIRST_POLL_S
        place: QueuePlace | None = None
        partition: str | None = None  # whose queue the job is known to stand in
        while True:
            self._each()
            asked = time.monotonic()
            try:
                # Who waits long wants to know when: then the queue is asked for, and the job alone when it left that.
                place = self._jobs.place(self._number, partition) if partition is not None else None
                job = place.job if place is not None else self._jobs.job(self._number)
                if job is not None and self._wait_s is not None:
                    partition = job.partition if job.state == "PENDING" else None
            except NoNodeReached as error:
                self._unreached(error)
                job = None
            else:
                if self._started_or_ended(job):
                    self._progress("")
                    assert job is not None
                    return job
                self._judge(job, place)
            # at most: a question to a dead controller takes 10 s, and a job must not run for minutes before we see it
            pause_s = min(_POLL_MAX_S, max(pause_s, _SHARE * (time.monotonic() - asked)))
            left_s = (self._patience_s if self._wait_s is None else self._wait_s) - self.waited_s
            time.sleep(max(0.05, min(pause_s, left_s if left_s > 0 else pause_s)))
            pause_s = min(pause_s * _GROWTH, _POLL_MAX_S)

    @property
    def waited_s(self) -> float:
        """Seconds since the job was submitted."""
        return time.monotonic() - self._started

    def _started_or_ended(self, job: JobState | None) -> bool:
        """Tell whether the job runs. Raises GpuboardError when it has ended."""
        if job is None:
            raise GpuboardError(f"Slurm knows no job {self._number} any more: it has ended, or was cancelled")
        if job.ended:
            reason = f" ({job.reason})" if job.reason not in {"", "None"} else ""
            raise GpuboardError(
                f"Slurm job {job.number} ended before it could be used: {job.state.lower()}{reason}; "
                f"see `scontrol show job {job.number}`"
            )
        return job.state in {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"}

    def _judge(self, job: JobState | None, place: QueuePlace | None) -> None:
        """Say how a job that does not run yet stands. Raises Refused when it is not waited for any longer."""
        assert job is not None
        if job.state != "PENDING":  # CONFIGURING: it has its nodes, which may have to boot
            self._progress(f"waiting {format_duration(self.waited_s)}: Slurm makes the nodes of job {job.number} ready")
            return
        if words := never_reason(job.reason):
            self._progress("")
            raise NeverPossible(Refusal(3, f"Slurm would never start it: {job.reason}: {words}"))
        words = pending_words(job, place)
        if self._wait_s is None:
            decided = not is_undecided(job.reason) and self.waited_s >= _DECIDED_S
            if decided or self.waited_s >= self._patience_s:
                self._progress("")
                raise NotFree(Refusal(4, f"not free now: {words}; try --wait", nearest="--wait"))
        elif self.waited_s >= self._wait_s:
            self._progress("")
            waited = format_duration(self._wait_s)
            raise NotFree(Refusal(4, f"not free within {waited}: {words}", nearest="--wait"))
        if self.waited_s >= _QUIET_S:
            self._progress(f"waiting {format_duration(self.waited_s)}: {words}")

    def _unreached(self, error: NoNodeReached) -> None:
        """Go on where somebody has time; the job is in the queue, whoever answers for it."""
        limit_s = self._patience_s if self._wait_s is None else self._wait_s
        if self.waited_s >= limit_s:
            self._progress("")
            raise error
        self._progress(f"waiting {format_duration(self.waited_s)}: {error}")


def pending_words(job: JobState, place: QueuePlace | None) -> str:
    """Return why a job waits, where in the queue it is, and when Slurm expects it to start."""
    reason = clean(job.reason, 200) if job.reason not in {"", "None"} else "Slurm has not looked at it yet"
    words = f"Slurm job {job.number} is pending ({reason})"
    if place is not None:
        words += f", number {place.ahead + 1} of {place.waiting} in {job.partition or 'its partition'}"
    if job.start is not None:
        words += f", start expected {day_time(job.start)}"
    return words
