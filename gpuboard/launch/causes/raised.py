"""The exception that ends a rank: what it is by its text, which of two is the cause, and what to try (pure)."""

from __future__ import annotations

import msgspec

from gpuboard.launch.causes.advice import advice
from gpuboard.launch.causes.cause import Symptom, symptom_of
from gpuboard.launch.events import FirstRaised, Raised
from gpuboard.launch.stalls.verdict import INIT_ONCE


def judged(raised: Raised) -> tuple[Raised, Symptom]:
    """Return the exception to report, and what it is: the one that was ending the rank before, unless that was a lost
    connection."""
    if raised.first is not None and symptom_of(raised.first.chain) == "own":
        return _with_first(raised, raised.first), "own"
    if raised.own_connection:
        return raised, "own"
    return raised, symptom_of(f"{raised.type}: {raised.message} {raised.note} {raised.chain}")


def hint(raised: Raised, *, has_stdin: bool) -> str:
    """Return what to try, "" if nothing is known. ``has_stdin``: the rank gets the standard input of gpuboard."""
    if raised.phase == "init" and raised.called:
        return f"→ it had a process group before, whose addresses are still in the store of this run: {INIT_ONCE}"
    # An exception while another one is handled is often a consequence of it.
    texts = [f"{raised.type}: {raised.message}", raised.note]
    if tip := next(filter(None, map(advice, texts if raised.note.startswith("then ") else reversed(texts))), ""):
        return f"→ {tip}"
    asks = raised.type == "bdb.BdbQuit" or (raised.type == "EOFError" and "reading a line" in raised.message)
    if asks and not has_stdin:
        return f"its standard input is /dev/null; --stdin {raised.rank} gives it that of gpuboard"
    return ""


def _with_first(raised: Raised, first: FirstRaised) -> Raised:
    """Return the exception that was ending the rank ``first``, with the newest one as its note."""
    place = f" at {raised.file}:{raised.line}" if raised.file else ""
    note = f"then {raised.type}: {raised.message.partition(chr(10))[0][:160]}{place}"
    fields = {name: getattr(first, name) for name in first.__struct_fields__}
    return msgspec.structs.replace(raised, **fields, note=note, own_connection=False, origin=None)
