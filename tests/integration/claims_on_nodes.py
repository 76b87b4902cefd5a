"""The claims that lie on the test nodes, and what must hold of them whatever was asked and killed at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.nodes import Cluster

NODES = ("gpu01", "gpu02", "gpu03")
SCOPE = "gpu[01-03]"

Lying = dict[tuple[str, str, str], tuple[int, dict[str, Any]]]  # (node, UUID, lease) → (uid, content)


def names(nodes: Cluster, name: str) -> list[Path]:
    """Return the files of the claims on a node."""
    return list(nodes[name].path("/var/tmp").glob("gpuboard.GPU-*"))


def lying(nodes: Cluster) -> Lying:
    """Return the claims as they lie on the nodes."""
    found = {}
    for name in NODES:
        for path in names(nodes, name):
            with contextlib.suppress(FileNotFoundError):  # its keeper releases what a killed one had been given
                content = json.loads(path.read_text())
                found[name, content["uuid"], content["lease"]] = (path.lstat().st_uid, content)
    return found


def claimed_by(left: Lying, purpose: str) -> set[tuple[str, str]]:
    """Return the (node, UUID) that claims of one purpose are on."""
    return {(node, uuid) for (node, uuid, _), (_, claim) in left.items() if claim["purpose"] == purpose}


def owners_of(left: Lying, purpose: str) -> set[int]:
    """Return the uids of claims of one purpose."""
    return {uid for uid, claim in left.values() if claim["purpose"] == purpose}


def release_all(nodes: Cluster, users: Iterable[str]) -> bool:
    """Release everything from one host; tell whether nothing is left."""
    for user in users:
        nodes["login1"].run(["gpuboard", "release", "--mine", "--nodes", SCOPE], user=user, timeout=120)
    return not lying(nodes)
