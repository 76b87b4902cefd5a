"""A lease as its keeper knows it, and how its end is decided. No I/O and no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpuboard.keeper.holder import Holder
from gpuboard.keeper.timing import TIMING, KeeperTiming

# What a login reaches other machines by, and what ends with it: its ssh agent, its Kerberos tickets.
_LOGIN = ("SSH_AUTH_SOCK", "KRB5CCNAME")


def login_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the login that ``env`` is of reaches other machines."""
    return {name: str(env[name]) for name in _LOGIN if env.get(name)}


class KeptNode(NamedTuple):
    """One node of a lease: what is claimed there and how to reach it."""

    name: str
    uuids: list[str]
    host: str | None  # what ssh is asked for; None: this machine
    claims_dir: str
    simulate: dict[str, Any] | None  # the description of simulated GPUs
    job: str | None = None  # the Slurm job through which it is reached, in place of ssh


class KeptJob(NamedTuple):
    """The job of a scheduler that a lease is."""

    job_name: str
    number: int | None  # None: it is being submitted
    heartbeat: str  # the file whose time is the heartbeat; "": the job lasts until its time limit
    touch_s: float  # between two heartbeats
    cancel: list[str]  # the command that ends it, by its name
    look: list[str]  # the command that prints ``number|state|name`` for each job of the user
    environ: dict[str, str]  # what both are run with
    taker: Holder | None  # the command that makes the lease, until it is published
    ended: dict[str, str]  # states in which a job holds nothing: why, "" where that is not known yet
    in_time: list[str]  # those of them that a job reaches by its time limit
    secrets: list[str]  # variables for the commands that no record holds: the keeper has them from its start
    mark: str  # NAME=VALUE in the environment of the command that submits the job…
    inside: str  # …where this variable is not set, which marks the processes of jobs


class LeaseRecord(NamedTuple):
    """What a record file holds. Times are CLOCK_BOOTTIME: they outlive the keeper, and the folder names the boot.

    ``session`` and ``group`` are the holder's, noted while it lived: its heirs are found by them.
    """

    lease: str
    nodes: list[KeptNode]
    settings: dict[str, Any]  # of gpuboard.config.Settings: how ssh reaches the nodes
    holder: Holder | None
    session: int
    group: int
    created: float  # seconds since boot
    until: float  # seconds since boot; only a time to look: the nodes' clocks decide, and `renew` is told to them
    job: KeptJob | None = None  # then ``nodes`` is one that stands for the scheduler

    def plain(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON."""
        values = self._asdict()
        values["nodes"] = [node._asdict() for node in self.nodes]
        values["holder"] = self.holder and self.holder._asdict()
        if self.job is not None:
            values["job"] = self.job._asdict() | {"taker": self.job.taker and self.job.taker._asdict()}
        return values


def decode(values: Any) -> LeaseRecord:
    """Return the record that plain ``values`` describe. Raises ValueError when they are none."""
    try:
        nodes = [
            KeptNode(
                str(n["name"]),
                [str(u) for u in n["uuids"]],
                n["host"],
                str(n["claims_dir"]),
                n["simulate"],
                n.get("job"),  # a keeper of an older release, whose leases we take over, knows none
            )
            for n in values["nodes"]
        ]
        record = LeaseRecord(
            str(values["lease"]),
            nodes,
            dict(values["settings"]),
            _holder(values["holder"]),
            int(values["session"]),
            int(values["group"]),
            float(values["created"]),
            float(values["until"]),
            _job(values.get("job")),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:  # the last: int of a number like 1e999
        raise ValueError(f"not a keeper's record: {error!r}") from None
    if not record.lease.isalnum() or not record.lease.isascii() or not nodes:
        raise ValueError("not a keeper's record: no lease id, or no nodes")
    return record


def _holder(values: Any) -> Holder | None:
    if not values:
        return None
    return Holder(str(values["host"]), str(values["boot_id"]), int(values["pid"]), int(values["start"]))


def _job(values: Any) -> KeptJob | None:
    if not values:
        return None
    return KeptJob(
        str(values["job_name"]),
        None if values["number"] is None else int(values["number"]),
        str(values["heartbeat"]),
        float(values["touch_s"]),
        [str(word) for word in values["cancel"]],
        [str(word) for word in values["look"]],
        {str(name): str(value) for name, value in values["environ"].items()},
        _holder(values["taker"]),
        {str(state): str(words) for state, words in values.get("ended", {}).items()},
        [str(state) for state in values.get("in_time", ())],
        [str(name) for name in values.get("secrets", ())],
        str(values.get("mark", "")),
        str(values.get("inside", "")),
    )


def files_of(record: LeaseRecord, state: str) -> list[str]:
    """Return the files that a lease has in the ``state`` folder besides its record, to be removed at its end."""
    found = [f"{state}/leases/{record.lease}.json"]  # the rank map
    if record.job is not None and record.job.heartbeat:
        found += [record.job.heartbeat, f"{record.job.heartbeat}.seen"]
    return found


class HolderLook(NamedTuple):
    """What a look after the holder's end found."""

    carriers: bool | None  # processes that carry the lease or run on its GPUs; None: a node gave no answer
    heirs: bool  # processes of the holder's session that may still start carriers


class EndDecision(NamedTuple):
    """What to do with a lease whose holder has gone."""

    release: bool
    again_s: float  # seconds until the next look
    since: float | None  # since when nothing carries it; None: something does


def judge(seen: HolderLook, since: float | None, now: float, timing: KeeperTiming = TIMING) -> EndDecision:
    """Decide after a look at ``now``; ``since`` is the last verdict's.

    Carriers keep a lease. Heirs, and nodes that do not answer, keep it for ``look_s``. Otherwise it ends at once.
    """
    if seen.carriers:
        return EndDecision(False, timing.carried_every_s, None)
    since = now if since is None else since
    hope = seen.heirs or seen.carriers is None
    return EndDecision(not hope or now - since >= timing.look_s, timing.look_every_s, since)
