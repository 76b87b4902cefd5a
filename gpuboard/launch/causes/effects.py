"""The root cause where every rank that failed blames another one, as far as it can be known (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpuboard.launch.causes.cause import Cause, FailureKind
from gpuboard.launch.causes.models import different_models
from gpuboard.launch.runs.folder import RankView
from gpuboard.launch.stalls.differences import LastCall
from gpuboard.launch.stalls.verdict import UNEVEN_INPUTS
from gpuboard.launch.stalls.waits import rank_words
from gpuboard.launch.stalls.words import exit_place, is_warning
from gpuboard.model.text import clean

_SIZES = re.compile(r"op\.nbytes\. (\d+) vs (\d+)")
_OF_TORCH = re.compile(  # not an upload's lost connection
    r"gloo|nccl|c10d|tcpstore|process ?group|torch\.distributed", re.IGNORECASE
)
_IN_INIT = " failed in init_process_group: "  # in the text of such a failure
_RACE_S = 0.2  # within which an exit and its effect on another rank may be reported in either order
_NAMED = 3  # ranks whose places are named


class Failures(NamedTuple):
    """What is known of a run whose ranks have failed."""

    ranks: Mapping[int, RankView]
    candidates: Sequence[Cause]  # in the order of their reports
    left: Mapping[int, tuple[float, int]]  # ranks that ended without an exception → when, exit code
    exits: Mapping[int, object]
    joined: set[int]  # ranks that have connected to the process group
    running: list[int]
    difference: tuple[str, list[int]] | None  # how the ranks' collectives differ, and the suspects
    last_calls: Mapping[int, LastCall]  # rank → its newest collective
    elsewhere: Mapping[int, str]  # rank that takes part in no collective → what it does, after "which"
    last_errors: Mapping[int, str]  # rank → the newest error, or else the last line, on its stderr
    where: Callable[[int], str]  # the name of a rank in messages
    exit_text: Callable[[int, int], str]  # what a rank's exit code means
    exit_places: Mapping[int, str]  # rank that called sys.exit(0) → where


def earlier_than(own: Cause, candidates: Sequence[Cause]) -> Cause:
    """Return a failure that may have caused ``own``, although it looks like an effect itself: a lost connection that is
    not torch's, to a server that is down. Without one, ``own``; so for a signal, which is no effect of a failure.

    An exception may have cut that connection shortly before it was reported.
    """
    race_s = {"exit": 0.0, "raised": _RACE_S}.get(own.kind, float("inf"))
    others = (one for one in candidates if own.at > one.at + race_s and one.symptom == "lost" and not _from_torch(one))
    return next(others, own)


def among_effects(failures: Failures) -> Cause:
    """Return the cause where every rank that failed blames another one, as far as it can be known."""
    for symptom in ("mismatch", "timeout"):
        if found := [c for c in failures.candidates if c.symptom == symptom]:
            return _mismatch(failures, found) if symptom == "mismatch" else _timeout(failures, found)
    of_torch = any(_from_torch(c) for c in failures.candidates)
    # Another connection than torch's has a reason of its own: a server, or a DataLoader worker that has died.
    first = next((c for c in failures.candidates if not _from_torch(c)), failures.candidates[0])
    left = sorted(
        (at, rank, code)
        for rank, (at, code) in failures.left.items()
        if (
            at <= first.at or _from_torch(first)
            if code
            else of_torch and rank in failures.joined and at <= first.at + _RACE_S
        )
    )
    if not left:
        return _left_group(failures, first) if _from_torch(first) else first
    at, rank, code = left[0]
    if code:
        known = next((c for c in failures.candidates if c.rank == rank), None)
        text = f"{failures.where(rank)} {failures.exit_text(rank, code)}"
        return known or Cause("exit", rank, failures.ranks[rank].node, text, at=at)
    gone = [rank for _, rank, code in left if not code]
    others = rank_words(sorted({c.rank for c in failures.candidates if c.rank is not None}))
    who, them = (failures.where(rank), "it") if len(gone) == 1 else (rank_words(gone), "them")
    text = f"{who} ended with exit code 0 in the middle of training; {others} lost the connection to {them}"
    text += exit_place([failures.exit_places.get(rank, "") for rank in gone])
    evidence = first.text
    quoted = clean(failures.last_errors.get(rank, ""), 200)
    last = re.sub(r"^last (line|error) on stderr: ", "", quoted)
    if last and len(gone) == 1 and not is_warning(last):  # maybe an error that the script has swallowed
        text += f"; its {quoted if last != quoted else f'last line on stderr: {last}'}"
    else:
        evidence += f"\n→ {UNEVEN_INPUTS}"
    return msgspec.structs.replace(
        _blaming(failures, "exit", gone, text, first), evidence=evidence, symptom="own", at=at
    )


def _from_torch(cause: Cause) -> bool:
    return _IN_INIT in cause.text or bool(_OF_TORCH.search(cause.text + cause.evidence + cause.chain))


def _left_group(failures: Failures, first: Cause) -> Cause:
    """Connections were lost although no rank has ended: one that is elsewhere may have closed them."""
    failed = {c.rank for c in failures.candidates if c.rank is not None}
    away = sorted(failures.elsewhere.keys() & set(failures.running) - failed)
    if not away:
        return first
    where = "; ".join(f"{failures.where(rank)}, which {failures.elsewhere[rank]}" for rank in away[:_NAMED])
    who = f"{rank_words(failed)} lost the connection to another rank, although none has ended"
    text = f"{who}: most likely to {where}; has it called destroy_process_group?"
    return _blaming(failures, "left-group", away, text, first)


def _mismatch(failures: Failures, found: list[Cause]) -> Cause:
    """The rank that receives too much data fails: with two ranks or many, that is not always the one at fault."""
    errors = {c.rank: c.text for c in found if c.rank is not None}
    if (models := different_models(errors, len(failures.ranks))) is not None:
        words, suspects = models
        text = words + (f"; most likely wrong: {failures.where(suspects[0])}" if len(suspects) == 1 else "")
        return _blaming(failures, "mismatch", suspects, text, found[0])
    who = rank_words(list(failures.ranks)).replace("-", " and ") if len(failures.ranks) == 2 else "the ranks"
    sizes = _SIZES.search(found[0].evidence) or _SIZES.search(found[0].text)
    got = f"received {sizes[1]} bytes and expected {sizes[2]}" if sizes else "received data of another size"
    where = ", ".join(failures.where(c.rank) for c in found if c.rank is not None)
    if failures.difference is not None:
        words, suspects = failures.difference
        return _blaming(failures, "mismatch", suspects, f"{words}; {where} {got}", found[0])
    known = failures.last_calls
    failed = {c.rank for c in found if c.rank is not None}
    others = sorted(failures.ranks.keys() - failed)
    if len(failed) == 1 and len(others) > 1 and known.keys() >= set(others):
        same = {known[rank].words for rank in others if known[rank].comparable}
        if len(same) == 1 and all(known[rank].comparable for rank in others):  # it alone expected another size
            one_place = len({known[rank].place for rank in others}) == 1
            call = known[others[0]].text if one_place else known[others[0]].words
            text = f"{rank_words(others)} called {call}; {where} {got}; most likely wrong: {where}"
            return _blaming(failures, "mismatch", sorted(failed), text, found[0])
    calls = [f"; {failures.where(rank)} called {call.text}" for rank, call in sorted(known.items())[:_NAMED]]
    text = (
        f"{who} called different collectives, or one with different shapes or dtypes: {where} {got}{''.join(calls)}"
        f"{'' if len(failures.ranks) == 2 else '; this does not show which rank is wrong'}"
    )
    return _blaming(failures, "mismatch", [], text, found[0])


def _timeout(failures: Failures, found: list[Cause]) -> Cause:
    """A rank whose wait ends by a timeout is not at fault."""
    ranks = sorted({c.rank for c in found if c.rank is not None})
    absent = sorted(failures.ranks.keys() - failures.joined - failures.exits.keys())
    others = absent or sorted(failures.ranks.keys() - {c.rank for c in failures.candidates} - failures.exits.keys())
    away = others if failures.elsewhere.keys() >= set(others) else []
    if away:
        places = (f"{failures.where(rank)}, which {failures.elsewhere[rank]}" for rank in away[:_NAMED])
        what = f"no answer from {'; '.join(places)}"
        if absent:
            what += f"; {'it has' if len(away) == 1 else 'they have'} not connected to the process group"
    elif absent:
        what = f"{rank_words(absent)} had not connected to the process group"
    elif others:
        what = f"{rank_words(others)} did not take part in time, or called a different collective"
    else:
        what = "the ranks called different collectives, or cannot reach each other"
    what = failures.difference[0] if failures.difference is not None else what
    place = "init_process_group" if all(_IN_INIT in c.text for c in found) else "a collective"
    text = f"{rank_words(ranks)} waited in {place} until its timeout: {what}"
    return _blaming(failures, "timeout", away if failures.difference is None else [], text, found[0])


def _blaming(failures: Failures, kind: FailureKind, suspects: Sequence[int], text: str, first: Cause) -> Cause:
    """Return a cause known from the failure ``first`` of another rank; it has a rank if there is one suspect only."""
    only = suspects[0] if len(suspects) == 1 else None
    node = None if only is None else failures.ranks[only].node
    return Cause(kind, only, node, text, first.text, symptom=first.symptom, at=first.at)
