"""Which route to a node is tried next: ssh or a step of a Slurm job; the agent or a shell. Pure; times are arguments.

In order of preference: the agent over ssh; a shell with nvidia-smi where there is no python3; the same through a step
of this user's job where ssh is not permitted or was refused; none where neither is permitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuboard.cluster.timing import TIMING, FleetTiming

# Failures of ssh after which a step of a job may still reach the node.
_REFUSALS = frozenset({"refused", "auth", "no-job", "host-key", "resolve", "unreachable", "timeout"})


class Route(NamedTuple):
    """One route to a node."""

    job: str | None = None  # through a step of this job; None: ssh, or on this machine a child process
    shell: bool = False  # a shell with nvidia-smi instead of the agent


class Routes:
    """The routes to one node. ``job``: a fixed route, through this job, whatever the scheduler answers."""

    def __init__(self, job: str | None, *, local: bool, timing: FleetTiming = TIMING) -> None:
        self._fixed = job
        self._local = local
        self._timing = timing
        self._ssh = True
        self._jobs: tuple[str, ...] = ()
        self._known: set[str] = set()  # all jobs and visits, as last permitted
        self._ssh_at = 0.0  # ssh is not tried before, while another route exists
        self._agent_at: dict[str | None, float] = {}  # by job: the agent is not tried before

    @property
    def closed(self) -> bool:
        """Whether no route is permitted."""
        return not self._ssh and not self._jobs and self._fixed is None

    def permit(self, *, ssh: bool, jobs: Sequence[str], visits: Sequence[str] = ()) -> bool:
        """Set what is permitted; return whether this user has a job there that was not there before, or was given up.

        ``visits``: this user's jobs there that are no route themselves, but may make the node accept ssh.
        """
        known = {*jobs, *visits}
        new, again = not known <= self._known, not {*jobs} <= {*self._jobs}
        self._ssh, self._jobs, self._known = ssh, tuple(jobs), known
        if new:
            self._ssh_at = 0.0
        return new or again

    def permits(self, route: Route) -> bool:
        """Return whether a link over ``route`` may stay."""
        if route.job is None:
            return self._ssh
        return route.job == self._fixed or route.job in self._jobs

    def next(self, now: float) -> Route | None:
        """Return the route to take now; None when none is permitted."""
        if self._fixed is not None:
            job: str | None = self._fixed
        elif self._ssh and (now >= self._ssh_at or not self._jobs):
            job = None
        elif self._jobs:
            job = self._jobs[0]
        else:
            return None
        return Route(job, shell=now < self._agent_at.get(job, 0.0))

    def agent_is_due(self, route: Route, now: float) -> bool:
        """Return whether it is time to try the agent again on a node that is read through a shell."""
        return route.shell and now >= self._agent_at.get(route.job, 0.0)

    def failed(self, route: Route, kind: str, now: float) -> float | None:
        """Record a failure of ``route``; return the pause before the next attempt, None: the usual back-off."""
        if kind == "no-python" and not self._local:
            if not route.shell:
                self._agent_at[route.job] = now + self._timing.agent_again_s
                return 0.0
            self._agent_at.pop(route.job, None)
            return None
        if self._fixed is not None:
            return None
        if route.job is None and kind in _REFUSALS:
            self._ssh_at = now + self._timing.ssh_again_s
            if self._jobs:
                return 0.0
            return self._timing.no_job_s if kind == "no-job" else None
        if route.job is not None and kind == "no-job":  # it has ended; the scheduler's next answer will lack it too
            self._jobs = tuple(job for job in self._jobs if job != route.job)
            if not self._jobs and now < self._ssh_at:
                return self._ssh_at - now
        return None
