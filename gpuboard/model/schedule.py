"""What the cluster's scheduler holds at one moment: its nodes, and the jobs that hold GPUs. Frozen values, no I/O.

Names and numbers are the scheduler's own. ``indexes`` are its numbering of a node's GPUs (Slurm's IDX), which is
neither NVML's nor always the number of the device file.
"""

from __future__ import annotations

import msgspec


class Gres(msgspec.Struct, frozen=True, gc=False):
    """GPUs of one type on one node, as the scheduler counts them."""

    type: str  # "h100"; "": the site gives its GPUs no type
    count: int
    indexes: tuple[int, ...] | None = None  # None: not said (untyped GPUs in a node's line, counts of an ended job)


class Grant(msgspec.Struct, frozen=True, gc=False):
    """What a job holds on one node."""

    node: str
    gpus: tuple[Gres, ...] = ()
    shards: tuple[Gres, ...] = ()  # parts of GPUs (gres/shard); ``indexes``: the GPUs they are parts of


class SchedulerJob(msgspec.Struct, frozen=True, gc=False):
    """A job that holds something, or is about to give it back."""

    id: str  # as people write it: "123", "15_1" (array), "25+1" (heterogeneous)
    number: int  # the controller's own number, the one that every command takes
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
    hostname: str  # what the node calls itself
    address: str
    state: str  # lower case, with its flags: "mixed+drain", "idle+maintenance+reserved", "down+not_responding"
    reason: str = ""  # why it is drained or down, who said so, when
    reservation: str = ""  # the reservation that is in force there now
    gpus: tuple[Gres, ...] = ()  # all it has
    used: tuple[Gres, ...] = ()  # given to jobs, those included that we may not see
    shards: int = 0
    used_shards: tuple[Gres, ...] = ()  # ``indexes``: the GPUs of which some are given away
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    doubt: str = ""  # what could not be read of it, so that no GPU of it may be called free; "": nothing

    @property
    def flags(self) -> frozenset[str]:
        """The words of ``state``."""
        return frozenset(self.state.split("+"))


class Schedule(msgspec.Struct, frozen=True, gc=False):
    """The controller's answer to one round of questions."""

    at: float  # epoch seconds by our clock, when it was asked
    cluster: str
    nodes: dict[str, SchedulerNode]
    jobs: tuple[SchedulerJob, ...] = ()  # only those that hold GPUs or shards, or are ending
    visited: dict[str, tuple[int, ...]] = {}  # node -> running jobs of the one who asks that hold no GPU there
    notes: tuple[str, ...] = ()  # what of the answer could not be read, or contradicts itself


class Seen(msgspec.Struct, frozen=True, gc=False):
    """What is known of the scheduler now."""

    schedule: Schedule | None = None  # the newest answer, however old
    arrived: float = 0.0  # when it was asked for, by our monotonic clock
    error: str | None = None  # why there is no newer one; None: the newest try was answered
    current_s: float = 90.0  # so old an answer may be and still say something about now

    def current(self, now: float) -> bool:
        """Return whether the newest answer says something about ``now`` (monotonic).

        Half as old an answer is too old where the newest try has failed: then no newer one is on its way.
        """
        limit_s = self.current_s if self.error is None else self.current_s / 2
        return self.schedule is not None and now - self.arrived <= limit_s
