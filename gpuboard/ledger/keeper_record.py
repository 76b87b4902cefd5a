"""A lease as its keeper knows it, and how its end is decided. No I/O and no clock of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuboard.ledger.holder import Holder

LOOK_S = 60.0  # how long processes that may become carriers are waited for after the holder's end
LOOK_EVERY_S = 2.0
CARRIED_EVERY_S = 5.0  # between two looks while carriers live


class KeptNode(NamedTuple):
    """One node of a lease: what is claimed there and how to reach it."""

    name: str
    uuids: list[str]
    host: str | None  # what ssh is asked for; None: this machine
    claims_dir: str
    simulate: dict[str, Any] | None  # the description of simulated GPUs
    job: str | None = None  # the Slurm job through which it is reached, in place of ssh


class Record(NamedTuple):
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

    def plain(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON."""
        values = self._asdict()
        values["nodes"] = [node._asdict() for node in self.nodes]
        values["holder"] = self.holder and self.holder._asdict()
        return values


def decode(values: Any) -> Record:
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
        holder = values["holder"]
        record = Record(
            str(values["lease"]),
            nodes,
            dict(values["settings"]),
            Holder(str(holder["host"]), str(holder["boot_id"]), int(holder["pid"]), int(holder["start"]))
            if holder
            else None,
            int(values["session"]),
            int(values["group"]),
            float(values["created"]),
            float(values["until"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a keeper's record: {error!r}") from None
    if not record.lease.isalnum() or not record.lease.isascii() or not nodes:
        raise ValueError("not a keeper's record: no lease id, or no nodes")
    return record


class Seen(NamedTuple):
    """What a look after the holder's end found."""

    carriers: bool | None  # processes that carry the lease or run on its GPUs; None: a node gave no answer
    heirs: bool  # processes of the holder's session that may still start carriers


class Verdict(NamedTuple):
    """What to do with a lease whose holder has gone."""

    release: bool
    again_s: float  # seconds until the next look
    since: float | None  # since when nothing carries it; None: something does


def judge(seen: Seen, since: float | None, now: float) -> Verdict:
    """Decide after a look at ``now``; ``since`` is the last verdict's.

    Carriers keep a lease. Heirs, and nodes that do not answer, keep it for LOOK_S. Otherwise it ends at once.
    """
    if seen.carriers:
        return Verdict(False, CARRIED_EVERY_S, None)
    since = now if since is None else since
    hope = seen.heirs or seen.carriers is None
    return Verdict(not hope or now - since >= LOOK_S, LOOK_EVERY_S, since)
