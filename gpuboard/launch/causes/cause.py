"""The cause of a failure, and what an error is by its text (pure)."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from gpuboard.launch.causes.models import compares_models

# Errors that a rank reports because another rank has gone: from gloo, NCCL, the store's client, sockets.
_LOST = re.compile(
    r"connection reset by peer|connection closed by peer|broken pipe|connection was likely closed|failed to recv|"
    r"socket closed|recvbytes|sendbytes|ncclremoteerror|remote process exited|connection refused|"
    r"timed out waiting for clients|store.*(shut ?down|closed)|heartbeat.*monitor",
    re.IGNORECASE,
)
# Data of another size than the collective expects: the receiver ends, whichever rank is wrong (gloo; DETAIL's wrapper).
_MISMATCH = re.compile(r"op\.preamble\.length|mismatch between collectives", re.IGNORECASE)
# A rank that waits for another one in a collective until the process group's timeout.
_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms for|collective operation timeout|wait timeout after|"
    r"(RuntimeError|what\(\)): +operation timed out!",
    re.IGNORECASE,
)

FailureKind = Literal[
    "raised",
    "exit",
    "signal",
    "before-init",
    "mismatch",
    "timeout",
    "left-group",
    "node-lost",
    "node-stopped",
    "store-died",
    "stalled",
    "stopped",
]
# What a failure is by its own account, in the order in which it explains those of other ranks: of the rank itself; a
# mismatch of collectives; a wait for another rank; a connection lost to another rank.
Symptom = Literal["own", "mismatch", "timeout", "lost"]


class Cause(msgspec.Struct, frozen=True):
    """Why a run failed or was stopped."""

    kind: FailureKind
    rank: int | None
    node: str | None
    text: str
    evidence: str = ""
    chain: str = ""  # types and messages of an exception and those below it
    symptom: Symptom = "own"
    at: float = 0.0
    place: str = ""  # type and line of an exception: the same for the same failure of any rank


def symptom_of(text: str) -> Symptom:
    """Return what an error is by its text."""
    if _MISMATCH.search(text) or compares_models(text):
        return "mismatch"
    if _TIMEOUT.search(text):
        return "timeout"
    return "lost" if _LOST.search(text) else "own"
