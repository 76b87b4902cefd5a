"""One named check, as ``doctor --json`` prints it (schema 1) and as preflight decides by it."""

from __future__ import annotations

import msgspec


class Check(msgspec.Struct, frozen=True):
    """What was looked at, how it stands, and what to do. ``status``: ok, warn, fail or skipped."""

    name: str
    node: str | None
    status: str
    evidence: str
    cause: str = ""
    remedy: str = ""


def check_text(check: Check) -> str:
    """Return a check in one line, or two where there is a remedy."""
    where = f" {check.node}:" if check.node else ""
    words = "; ".join(part for part in (check.evidence, check.cause) if part)
    line = f"{check.status:<4} {check.name}:{where} {words}"
    return f"{line}\n     → {check.remedy}" if check.remedy else line
