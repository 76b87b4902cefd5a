"""The result of one named check, for preflight and for ``doctor --json`` (schema 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    CheckStatus = Literal["ok", "warn", "fail", "skipped"]
else:  # preflight.json is decoded with any status: a newer gpuboard may have written it
    CheckStatus = str


class Check(msgspec.Struct, frozen=True):
    """What was checked, the result, its cause and the remedy."""

    name: str
    node: str | None
    status: CheckStatus
    evidence: str
    cause: str = ""
    remedy: str = ""


def grouped(checks: Sequence[Check]) -> list[Check]:
    """Return ``checks`` with those merged that differ in their evidence only."""
    merged: dict[tuple[str, str | None, str, str, str], Check] = {}
    for check in checks:
        key = (check.name, check.node, check.status, check.cause, check.remedy)
        before = merged.get(key)
        words = f"{before.evidence}, {check.evidence}" if before else check.evidence
        merged[key] = msgspec.structs.replace(check, evidence=words)
    return list(merged.values())


def check_text(check: Check) -> str:
    """Return a check as one line, or two if it has a remedy."""
    where = f" {check.node}:" if check.node else ""
    words = "; ".join(part for part in (check.evidence, check.cause) if part)
    line = f"{check.status:<4} {check.name}:{where} {words}"
    return f"{line}\n     → {check.remedy}" if check.remedy else line
