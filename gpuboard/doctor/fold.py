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
_MOST: dict[CheckStatus, int] = {"ok": 4, "skipped": 4, "warn": 12, "fail": 12}  # lines with one name and status


def fold(checks: Sequence[Check]) -> list[Check]:
    """Return ``checks`` ordered by name, those merged that differ only in their node, which is then a nodeset.

    In merged checks a node's own name becomes NODE: errors of ssh contain it. Different results of one check and status
    are listed up to ``_MOST``; the rest is one line.
    """
    merged: dict[Check, list[Check]] = {}
    for check in checks:
        merged.setdefault(_anonymous(check), []).append(check)
    by_kind: dict[tuple[str, CheckStatus], list[list[Check]]] = {}
    for members in merged.values():
        by_kind.setdefault((members[0].name, members[0].status), []).append(members)
    names = list(dict.fromkeys(check.name for check in checks))
    lines = []
    for (name, status), groups in sorted(by_kind.items(), key=lambda item: names.index(item[0][0])):
        most = _MOST[status]
        listed, rest = (groups, []) if len(groups) <= most else (groups[: most - 1], groups[most - 1 :])
        lines += [_line(members) for members in listed]
        if rest:
            others = [check for members in rest for check in members]
            words = f"{len(others)} {'more ' if listed else ''}results; --json has them all"
            lines.append(Check(name, _nodeset(others), status, words))
    return lines


def summary(checks: Sequence[Check]) -> str:
    """Return how many checks have each status: ``23 ok, 1 warning, 2 failed``."""
    counts = Counter(check.status for check in checks)
    return ", ".join(
        f"{counts[status]} {one if counts[status] == 1 else many}" for status, one, many in _SUMMARY if counts[status]
    )


def _line(members: Sequence[Check]) -> Check:
    """Return one check for those that differ only in their node."""
    if len(members) == 1:
        return members[0]
    return msgspec.structs.replace(_anonymous(members[0]), node=_nodeset(members))


def _anonymous(check: Check) -> Check:
    if check.node is None:
        return check
    own = re.compile(rf"(?<![\w.-]){re.escape(check.node)}(?![\w-])")
    texts = {key: own.sub("NODE", getattr(check, key)) for key in ("evidence", "cause", "remedy")}
    return msgspec.structs.replace(check, node="", **texts)


def _nodeset(checks: Sequence[Check]) -> str | None:
    names = list(dict.fromkeys(check.node for check in checks if check.node is not None))
    return folded(names) if names else None
