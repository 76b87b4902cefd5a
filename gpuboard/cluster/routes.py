"""Which way to a node is tried next: ssh, a step of a Slurm job of ours, the agent or a shell; pure, times are given.

From the top: ssh and the agent; a shell with nvidia-smi where there is no python3; the same through a job of ours
where ssh is not allowed or refused; nothing at all where neither is permitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuboard.cluster.timing import TIMING, FleetTiming

# Reasons for which the same connection through a job may well work.
_REFUSALS = frozenset({"refused", "auth", "no-job", "host-key", "resolve", "unreachable", "timeout"})


class Route(NamedTuple):
    """One way to a node."""

    job: str | None = None  # through a step of this job; None: by ssh (or, on this machine, as a child process)
    shell: bool = False  # not the agent but a shell with nvidia-smi


class Ladder:
    """The ways to one node. ``job``: a job that it is reached through whatever the scheduler says."""

    def __init__(self, job: str | None, *, local: bool, timing: FleetTiming = TIMING) -> None:
        self._fixed = job
        self._local = local
        self._timing = timing
        self._ssh = True
        self._jobs: tuple[str, ...] = ()
        self._visits: tuple[str, ...] = ()
        self._ssh_at = 0.0  # not before, while there is another way
        self._agent_at: dict[str | None, float] = {}  # by job: a shell until then

    @property
    def closed(self) -> bool:
        """Whether no way is permitted."""
        return not self._ssh and not self._jobs and self._fixed is None

    def permit(self, *, ssh: bool, jobs: Sequence[str], visits: Sequence[str] = ()) -> bool:
        """Take note of what is permitted from now on; return whether a job of ours is there that was not before.

        ``visits``: jobs of ours there that are no way themselves, but may open ssh's.
        """
        new = not {*jobs, *visits} <= {*self._jobs, *self._visits}
        self._ssh, self._jobs, self._visits = ssh, tuple(jobs), tuple(visits)
        if new:
            self._ssh_at = 0.0
        return new

    def permits(self, way: Route) -> bool:
        """Return whether a connection over ``way`` may stay."""
        if way.job is None:
            return self._ssh
        return way.job == self._fixed or way.job in self._jobs

    def way(self, now: float) -> Route | None:
        """Return the way to take now; None when none is permitted."""
        if self._fixed is not None:
            job: str | None = self._fixed
        elif self._ssh and (now >= self._ssh_at or not self._jobs):
            job = None
        elif self._jobs:
            job = self._jobs[0]
        else:
            return None
        return Route(job, shell=now < self._agent_at.get(job, 0.0))

    def agent_is_due(self, way: Route, now: float) -> bool:
        """Return whether it is time to look for python3 again where a shell serves."""
        return way.shell and now >= self._agent_at.get(way.job, 0.0)

    def failed(self, way: Route, kind: str, now: float) -> float | None:
        """Take note that ``way`` led nowhere; return how long to wait before the next, None: as after any failure."""
        if kind == "no-python" and not self._local:
            if not way.shell:
                self._agent_at[way.job] = now + self._timing.agent_again_s
                return 0.0
            self._agent_at.pop(way.job, None)
            return None
        if self._fixed is not None:
            return None
        if way.job is None and kind in _REFUSALS:
            if self._jobs:
                self._ssh_at = now + self._timing.ssh_again_s
                return 0.0
            return self._timing.no_job_s if kind == "no-job" else None
        if way.job is not None:
            self._ssh_at = 0.0
            if kind == "no-job":  # it has ended; the scheduler's next answer will say so, too
                self._jobs = tuple(job for job in self._jobs if job != way.job)
        return None
