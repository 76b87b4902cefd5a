"""The scheduler's nodes and jobs at one moment. Frozen values, no I/O.

Names and numbers are the scheduler's own. ``indexes`` are its numbering of a node's GPUs (Slurm's IDX), which is
neither NVML's nor always the device file's number.
"""

from __future__ import annotations

import msgspec


class Gres(msgspec.Struct, frozen=True, gc=False):
    """GPUs of one type on one node, as the scheduler counts them."""

    type: str  # "h100"; "": the site gives its GPUs no type
    count: int
    indexes: tuple[int, ...] | None = None  # None: not reported (untyped GPUs of a node, counts of an ended job)


class Grant(msgspec.Struct, frozen=True, gc=False):
    """What a job holds on one node."""

    node: str
    gpus: tuple[Gres, ...] = ()
    shards: tuple[Gres, ...] = ()  # parts of GPUs (gres/shard); ``indexes``: the GPUs they are parts of


class SchedulerJob(msgspec.Struct, frozen=True, gc=False):
    """A job that holds something, or is about to release it."""

    id: str  # as users write it: "123", "15_1" (array), "25+1" (heterogeneous)
    number: int  # the controller's number, accepted by every command
    user: str
    uid: int
    name: str
    partition: str
    state: str  # lower case: "running", "suspended", "completing", …
    grants: tuple[Grant, ...]
    started: float | None = None  # epoch seconds by the controller's clock
    until: float | None = None  # None: no limit
    comment: str = ""


class SchedulerNode(msgspec.Struct, frozen=True, gc=False):
    """A node as the scheduler sees it."""

    name: str
    hostname: str  # the node's own name
    address: str
    state: str  # lower case, with its flags: "mixed+drain", "idle+maintenance+reserved", "down+not_responding"
    reason: str = ""  # why it is drained or down, set by whom and when
    reservation: str = ""  # the reservation that is active there now
    gpus: tuple[Gres, ...] = ()  # all it has
    used: tuple[Gres, ...] = ()  # held by jobs, including those hidden from this user
    shards: int = 0
    used_shards: tuple[Gres, ...] = ()  # ``indexes``: the GPUs with shards in use
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    doubt: str = ""  # what could not be read of it, so that none of its GPUs counts as free; "": nothing

    @property
    def flags(self) -> frozenset[str]:
        """The words of ``state``."""
        return frozenset(self.state.split("+"))


class Schedule(msgspec.Struct, frozen=True, gc=False):
    """The controller's answer to one query cycle."""

    at: float  # epoch seconds by this host's clock, when it was queried
    cluster: str
    nodes: dict[str, SchedulerNode]
    jobs: tuple[SchedulerJob, ...] = ()  # only those that hold GPUs or shards, or are ending
    visited: dict[str, tuple[int, ...]] = {}  # node -> this user's running jobs that hold no GPU there
    notes: tuple[str, ...] = ()  # parts of the answer that could not be read or contradict each other


class Seen(msgspec.Struct, frozen=True, gc=False):
    """What is known of the scheduler now."""

    schedule: Schedule | None = None  # the newest answer, however old
    arrived: float = 0.0  # when it was queried; monotonic
    error: str | None = None  # why there is no newer one; None: the newest query was answered
    current_s: float = 90.0  # an answer up to this age counts as current

    def current(self, now: float) -> bool:
        """Return whether the newest answer counts as current at ``now`` (monotonic).

        The limit is halved if the newest query has failed: then no newer answer is under way.
        """
        limit_s = self.current_s if self.error is None else self.current_s / 2
        return self.schedule is not None and now - self.arrived <= limit_s
