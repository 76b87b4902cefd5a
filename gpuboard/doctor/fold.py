"""Equal results of many nodes as one line (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from gpuboard.cluster.inventory.nodes import folded
from gpuboard.launch.preflight.check import Check, CheckStatus

_SUMMARY: tuple[tuple[CheckStatus, str, str], ...] = (
    ("ok", "ok", "ok"),
    ("warn", "warning", "warnings"),
    ("fail", "failed", "failed"),
    ("skipped", "skipped", "skipped"),
)


def fold(checks: Sequence[Check]) -> list[Check]:
    """Return ``checks`` ordered by name, those merged that differ only in their node, which is then a nodeset.

    A node's own name in the texts becomes NODE: each error of ssh names its node.
    """
    names = list(dict.fromkeys(check.name for check in checks))
    merged: dict[Check, list[Check]] = {}
    for check in sorted(checks, key=lambda check: names.index(check.name)):
        merged.setdefault(_anonymous(check), []).append(check)
    return [
        members[0] if len(members) == 1 else msgspec.structs.replace(common, node=_nodeset(members))
        for common, members in merged.items()
    ]


def summary(checks: Sequence[Check]) -> str:
    """Return how many checks have each status: ``23 ok, 1 warning, 2 failed``."""
    counts = Counter(check.status for check in checks)
    return ", ".join(
        f"{counts[status]} {one if counts[status] == 1 else many}" for status, one, many in _SUMMARY if counts[status]
    )


def _anonymous(check: Check) -> Check:
    if check.node is None:
        return check
    own = re.compile(rf"(?<![\w.-]){re.escape(check.node)}(?![\w-])")
    texts = {key: own.sub("NODE", getattr(check, key)) for key in ("evidence", "cause", "remedy")}
    return msgspec.structs.replace(check, node="", **texts)


def _nodeset(checks: Sequence[Check]) -> str | None:
    names = list(dict.fromkeys(check.node for check in checks if check.node is not None))
    return folded(names) if names else None
