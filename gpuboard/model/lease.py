"""Leases as people see them, made of the claims that lie on the nodes (``leases --json``, schema 1)."""

from __future__ import annotations

import msgspec


class LeaseGpu(msgspec.Struct, frozen=True, gc=False):
    """One GPU of a lease."""

    node: str
    index: int | None  # None when the GPU is not in the newest reading (fell off the bus)
    uuid: str
    share: int | None = None  # bytes


class LeaseHolder(msgspec.Struct, frozen=True, gc=False):
    """The process a lease lives with; ``alive`` is None when it runs on another host than ours."""

    pid: int
    alive: bool | None


class Lease(msgspec.Struct, frozen=True, gc=False, rename={"since": "from"}):
    """A reservation: who holds which GPUs, from when, until when."""

    id: str
    owner: str
    uid: int
    host: str
    gpus: list[LeaseGpu]
    since: str
    until: str
    holder: LeaseHolder | None
    purpose: str = ""
    job: str | None = None
    flags: list[str] = []
    remaining_s: float = 0.0
    nodes: list[str] = []  # every node it covers, those included that gave no reading


class LeaseList(msgspec.Struct, frozen=True, gc=False):
    """What ``leases --json`` prints."""

    schema: int
    at: str
    leases: list[Lease]
    unread: list[str] = []  # nodes whose claims could not be read: leases there are missing from the list
