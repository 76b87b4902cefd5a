"""The keeper's record of a lease, and the decision when the lease ends. Pure."""

# No postponed annotations: typing would compile each of them, at every start.

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpuboard.keeper.holder import Holder
from gpuboard.keeper.timing import TIMING, KeeperTiming

_CONNECTIONS = 64  # set up at a time, where the settings do not have it
# The credentials of a login, which end with it: its ssh agent, its Kerberos tickets.
_LOGIN = ("SSH_AUTH_SOCK", "KRB5CCNAME")


def login_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a login that name its credentials for other machines."""
    return {name: str(env[name]) for name in _LOGIN if env.get(name)}


class KeptNode(NamedTuple):
    """One node of a lease: the claimed GPUs and how to reach it."""

    name: str
    uuids: list[str]
    host: str | None  # the destination of ssh; None: this machine
    claims_dir: str
    simulate: dict[str, Any] | None  # the description of simulated GPUs
    job: str | None = None  # the Slurm job through which it is reached, in place of ssh


class KeptJob(NamedTuple):
    """The job of a lease in a scheduler."""

    job_name: str
    number: int | None  # None: it is being submitted
    heartbeat: str  # the file whose mtime is the heartbeat; "": the job runs until its time limit
    touch_s: float  # between two heartbeats
    cancel: list[str]  # the command that cancels it by its name
    look: list[str]  # the command that prints ``number|state|name`` for each job of the user
    environ: dict[str, str]  # of both commands
    taker: Holder | None  # the command that reserves, until the lease is published
    ended: dict[str, str]  # states in which a job holds nothing: the reason, "" where it is not known yet
    in_time: list[str]  # those of them that the time limit causes
    secrets: list[str]  # variables for the commands that must not be written to a record: from the keeper's environment
    mark: str  # NAME=VALUE in the environment of the command that submits the job…
    inside: str  # …where this variable is not set, which marks the processes of jobs


class LeaseRecord(NamedTuple):
    """The content of a record file. Times are CLOCK_BOOTTIME: they outlive the keeper, and the folder names the boot.

    ``session`` and ``group`` are the holder's, noted while it was alive, to find the orphans it leaves.
    """

    lease: str
    nodes: list[KeptNode]
    settings: dict[str, Any]  # of gpuboard.config.Settings: how ssh reaches the nodes
    holder: Holder | None
    session: int
    group: int
    created: float  # seconds since boot
    until: float  # seconds since boot; only schedules a poll: the nodes' clocks decide
    job: KeptJob | None = None  # then ``nodes`` is one entry for the scheduler
    shared: bool = False  # the lease is another keeper's: this one sends heartbeats for the holder, and never releases
    others: tuple[Holder, ...] = ()  # further holders of a shared lease: other runs of this host that use it

    @property
    def rounds(self) -> int:
        """In how many rounds its nodes are connected to: ``max_connections`` are set up at a time."""
        most = self.settings.get("max_connections")
        return -(-len(self.nodes) // (most if isinstance(most, int) and most > 0 else _CONNECTIONS))

    def plain(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON."""
        values = self._asdict()
        values["nodes"] = [node._asdict() for node in self.nodes]
        values["holder"] = self.holder and self.holder._asdict()
        values["others"] = [holder._asdict() for holder in self.others]
        if self.job is not None:
            values["job"] = self.job._asdict() | {"taker": self.job.taker and self.job.taker._asdict()}
        return values

    def with_run(self, run: "LeaseRecord") -> "LeaseRecord":
        """Return this record of a shared lease for another run, too, whose record is ``run``."""
        nodes = {node.name: node for node in self.nodes}
        for node in run.nodes:
            known = nodes.get(node.name, node)
            nodes[node.name] = known._replace(uuids=sorted({*known.uuids, *node.uuids}))
        added = () if run.holder is None else (run.holder,)
        return self._replace(
            nodes=list(nodes.values()), until=max(self.until, run.until), others=(*self.others, *added)
        )


def decode(values: Any) -> LeaseRecord:
    """Return the record in plain ``values``. Raises ValueError for anything else."""
    try:
        nodes = [
            KeptNode(
                str(n["name"]),
                [str(u) for u in n["uuids"]],
                n["host"],
                str(n["claims_dir"]),
                n["simulate"],
                n.get("job"),  # missing in records of older releases
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
            bool(values.get("shared")),
            tuple(holder for holder in map(_holder, values.get("others", ())) if holder is not None),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:  # OverflowError: int of 1e999
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
    """Return a lease's files in the ``state`` folder besides its record, to be removed at its end."""
    if record.shared:
        return []
    found = [f"{state}/leases/{record.lease}.json"]  # the rank map
    if record.job is not None and record.job.heartbeat:
        found += [record.job.heartbeat, f"{record.job.heartbeat}.seen"]
    return found


class HolderLook(NamedTuple):
    """What was found after the holder's end."""

    carriers: bool | None  # processes that carry the lease or run on its GPUs; None: a node gave no answer
    orphans: bool  # processes of the holder's session that may still start carriers


class EndDecision(NamedTuple):
    """What to do with a lease whose holder has ended."""

    release: bool
    again_s: float  # seconds until the next look
    since: float | None  # since when it has no carrier; None: it has one


def decide(seen: HolderLook, since: float | None, now: float, timing: KeeperTiming = TIMING) -> EndDecision:
    """Decide what to do at ``now``; ``since`` is that of the last decision.

    Carriers hold a lease. Orphans, and nodes that do not answer, hold it for ``look_s``. Otherwise it ends at once.
    """
    if seen.carriers:
        return EndDecision(False, timing.carried_every_s, None)
    since = now if since is None else since
    possible = seen.orphans or seen.carriers is None
    return EndDecision(not possible or now - since >= timing.look_s, timing.look_every_s, since)
