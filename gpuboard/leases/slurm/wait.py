"""Wait until a submitted job runs, or find out why it does not; polls Slurm with growing intervals."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuboard.errors import GpuboardError, NeverPossible, NotFree
from gpuboard.model.request import Refusal
from gpuboard.model.text import clean
from gpuboard.model.units import day_time, format_duration
from gpuboard.scheduler.slurm.client import Jobs, JobState, QueuePlace
from gpuboard.scheduler.slurm.sbatch_args import is_undecided, never_reason

_FIRST_POLL_S = 0.1
_POLL_MAX_S = 30.0
_GROWTH = 1.4
_QUERY_SHARE = 20  # a pause lasts at least this many times as long as the query before it
_QUIET_S = 1.0  # no progress shown before: most jobs that can start have started by then
_PREPARED = {"CONFIGURING", "POWER_UP_NODE"}  # the job has its nodes, which boot or run a prolog: Slurm limits that
_DECIDED_S = 1.0  # the reason of a newly submitted job may be outdated within a second


class JobWait:
    """Waits for one job. ``wait_s``: how long (inf: no limit), None: until Slurm has considered it."""

    def __init__(
        self,
        jobs: Jobs,
        number: int,
        wait_s: float | None,
        patience_s: float,
        *,
        progress: Callable[[str], None],
        before_poll: Callable[[], None],
    ) -> None:
        """``before_poll`` may raise to end the wait."""
        self._jobs = jobs
        self._number = number
        self._wait_s = wait_s
        self._patience_s = patience_s
        self._progress = progress
        self._before_poll = before_poll
        self._started = time.monotonic()

    def run(self) -> JobState:
        """Return the job when it runs.

        Raises NotFree and NeverPossible with Slurm's reason, GpuboardError for a job that ended, and the error of a
        query that fails when the wait is over.
        """
        pause_s = _FIRST_POLL_S
        place: QueuePlace | None = None
        partition: str | None = None  # the partition in whose queue the job is
        while True:
            self._before_poll()
            polled_at = time.monotonic()
            try:
                # Query the whole queue, for the job's place in it, and only the job once it has left the queue.
                place = self._jobs.place(self._number, partition) if partition is not None else None
                job = place.job if place is not None else self._jobs.job(self._number)
                if job is not None and self._wait_s is not None:
                    partition = job.partition if job.state == "PENDING" else None
            except GpuboardError as error:
                self._check_failed(error)
                job = None
            else:
                if self._has_started(job):
                    self._progress("")
                    assert job is not None
                    return job
                self._check_pending(job, place)
            # capped: a query to a controller that is down takes 10 s, and a started job must be noticed soon
            pause_s = min(_POLL_MAX_S, max(pause_s, _QUERY_SHARE * (time.monotonic() - polled_at)))
            left_s = (self._patience_s if self._wait_s is None else self._wait_s) - self.waited_s
            time.sleep(max(0.05, min(pause_s, left_s if left_s > 0 else pause_s)))
            pause_s = min(pause_s * _GROWTH, _POLL_MAX_S)

    @property
    def waited_s(self) -> float:
        """Seconds since the job was submitted."""
        return time.monotonic() - self._started

    def _has_started(self, job: JobState | None) -> bool:
        if job is None:
            raise GpuboardError(f"job {self._number} is no longer known to Slurm: it ended or was cancelled")
        if job.ended:
            reason = f" ({job.reason})" if job.reason not in {"", "None"} else ""
            raise GpuboardError(
                f"Slurm job {job.number} ended before it could be used: {job.state.lower()}{reason}; "
                f"see `scontrol show job {job.number}`"
            )
        return job.state in {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"}

    def _check_pending(self, job: JobState | None, place: QueuePlace | None) -> None:
        """Show the progress of a job that does not run yet. Raises Refused if the wait for it ends."""
        assert job is not None
        if job.state in _PREPARED:
            self._progress(f"waiting {format_duration(self.waited_s)}: Slurm prepares the nodes of job {job.number}")
            return
        if why := never_reason(job.reason):
            self._progress("")
            raise NeverPossible(Refusal(3, f"Slurm can never start job {job.number}: {job.reason}: {why}"))
        pending = described(job, place)
        if self._wait_s is None:
            decided = not is_undecided(job.reason) and self.waited_s >= _DECIDED_S
            if decided or self.waited_s >= self._patience_s:
                self._progress("")
                raise NotFree(Refusal(4, f"not free now: {pending}; try --wait", nearest="--wait"))
        elif self.waited_s >= self._wait_s:
            self._progress("")
            waited = format_duration(self._wait_s)
            raise NotFree(Refusal(4, f"not free within {waited}: {pending}", nearest="--wait"))
        if self.waited_s >= _QUIET_S:
            self._progress(f"waiting {format_duration(self.waited_s)}: {pending}")

    def _check_failed(self, error: GpuboardError) -> None:
        """Show why a query failed. Raises the error if the wait is over; until then the job stays queued."""
        limit_s = self._patience_s if self._wait_s is None else self._wait_s
        if self.waited_s >= limit_s:
            self._progress("")
            raise error
        self._progress(f"waiting {format_duration(self.waited_s)}: {error}")


def described(job: JobState, place: QueuePlace | None) -> str:
    """Return the state of a job that waits, the reason, its place in the queue and its expected start."""
    undecided = "not considered by Slurm yet" if job.state == "PENDING" else ""
    reason = clean(job.reason, 200) if job.reason not in {"", "None"} else undecided
    text = f"Slurm job {job.number} is {job.state.lower()}{reason and f' ({reason})'}"
    if place is not None:
        text += f", number {place.ahead + 1} of {place.waiting} in {job.partition or 'its partition'}"
    if job.start is not None:
        text += f", expected start {day_time(job.start)}"
    return text
