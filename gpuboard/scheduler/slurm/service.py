"""Slurm, seen through its own commands: a few a cycle, shared by all processes of a user."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from gpuboard.config import Settings
from gpuboard.model.schedule import Seen
from gpuboard.model.units import parse_duration
from gpuboard.scheduler.base import QUERY_S
from gpuboard.scheduler.slurm.cache import Cache, CachedAnswer, now
from gpuboard.scheduler.slurm.query_cycle import CycleResult, QueryCycle
from gpuboard.scheduler.slurm.site import Site, here, key

ROUND_S = 12.0  # one cycle's commands together; Slurm's own wait for ten
SHARE = 0.05  # of the time may pass in Slurm's commands, in the long run
CREDIT_S = 15.0  # at once: what the share makes of five minutes
CURRENT_S = 30.0  # so long, at least, an answer says something about now
BACK_OFF_S = 300.0  # at most, between two tries
REFUSED_S = 60.0  # the same where the try costs next to nothing: nobody listens there
STUCK_S = ROUND_S + 1.0  # so long a process that asks is waited for
NEWS_S = 2.0  # between two looks for what other processes have learnt, or changed
_CHEAP_S = 0.5
_PAUSE_S = 0.05  # between two looks for what another process has learnt
_WAITING = "it is being asked by another gpuboard of yours, and has not answered yet"


def outdate(env: Mapping[str, str]) -> None:
    """Take note that Slurm holds other things since a command of ours: who looks next asks anew, as far as it may."""
    cache = Cache(env, key(here(env), env))
    stored = cache.load()
    if stored is not None and stored.schedule is not None and not stored.failures:
        cache.store(replace(stored, outdated=now()))


class Slurm:
    """What Slurm holds; implements scheduler/base.py. For any thread."""

    def __init__(self, settings: Settings, env: Mapping[str, str], site: Site) -> None:
        self._interval_s = parse_duration(settings.slurm.interval)
        self._cache = Cache(env, key(site, env))
        self._questions = QueryCycle(site, env)
        self._lock = threading.Lock()  # held while this process asks
        self._ended = threading.Event()
        self._known = CachedAnswer(self._cache.boot, credit_s=CREDIT_S)
        self._jitter = 0.8 + 0.4 * os.urandom(1)[0] / 255  # so that who waits for a controller does not come in a crowd

    @property
    def seen(self) -> Seen:
        """What is known now; from any thread, without waiting."""
        known = self._known
        current_s = max(CURRENT_S, 3 * self._interval_s, _rest_s(known) + ROUND_S)
        return Seen(known.schedule, time.monotonic() - (now() - known.answered), known.error, current_s)

    def start(self, changed: Callable[[], None]) -> None:
        """Keep asking, from a thread, until closed; ``changed`` is called after each answer or error."""
        threading.Thread(target=self._keep, args=(changed,), name="slurm", daemon=True).start()

    def look(self, timeout_s: float = QUERY_S) -> Seen:
        """Ask once where the newest shared answer is too old, waiting at most so long; return what is known then."""
        self._refresh(time.monotonic() + timeout_s)
        return self.seen

    def close(self) -> None:
        """Stop asking, at once; a command that hangs is left behind."""
        self._ended.set()
        self._questions.stop()

    def _keep(self, changed: Callable[[], None]) -> None:
        while not self._ended.is_set():
            before = self._known
            self._refresh(time.monotonic() + 2 * ROUND_S)
            if self._known is not before and not self._ended.is_set():
                changed()
            self._ended.wait(min(NEWS_S, max(self._due_s(), 10 * _PAUSE_S)))

    def _refresh(self, deadline: float) -> None:
        """Bring what is known up to date by what another process has learnt, else by asking."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        try:
            begun = time.monotonic()
            while not self._ended.is_set() and self._adopt() > 0:
                stuck = time.monotonic() - begun > STUCK_S  # who has the lock was stopped, say by ctrl-Z
                with self._cache.turn() as ours:
                    if ours or stuck:
                        if self._adopt() > 0:
                            self._ask(min(ROUND_S, deadline - time.monotonic()))
                        return
                if time.monotonic() >= deadline:
                    if self._known.schedule is None and self._known.error is None:
                        self._known = replace(self._known, error=_WAITING)
                    return
                self._ended.wait(_PAUSE_S)
        finally:
            self._lock.release()

    def _adopt(self) -> float:
        """Take over what is newer in the file; return for how long the next try is overdue."""
        stored = self._cache.load()
        known = self._known
        if stored is not None and (stored.asked, stored.outdated) > (known.asked, known.outdated):
            if stored.schedule is None:
                stored = replace(stored, schedule=self._known.schedule, answered=self._known.answered)
            self._known = stored
        return -self._due_s()

    def _due_s(self) -> float:
        """Return seconds until the next try."""
        known = self._known
        if known.asked == 0:
            return -1.0
        if known.outdated > known.asked:
            return known.asked + known.took_s + _rest_s(known) - now()
        return known.asked + known.took_s + pause_s(known, self._interval_s, self._jitter) - now()

    def _ask(self, timeout_s: float) -> None:
        """Ask Slurm and let the others know."""
        known = self._known
        asked = now()
        answer = self._questions.ask(timeout_s, probe=known.failures > 0 and known.contact, before=known.schedule)
        if self._ended.is_set():
            return  # the command was killed by us
        stored = self._cache.load()
        if stored is not None and stored.outdated > known.outdated:  # meanwhile: the answer may be of before
            known = replace(known, outdated=stored.outdated)
        self._known = after(known, answer, asked, self._questions.took_s)
        self._cache.store(self._known)


def after(known: CachedAnswer, answer: CycleResult, asked: float, took_s: float) -> CachedAnswer:
    """Return what is known after a try that began at ``asked`` and took ``took_s`` in Slurm's commands."""
    credit_s = min(CREDIT_S, known.credit_s + SHARE * (asked - known.asked)) if known.asked else CREDIT_S
    known = replace(
        known,
        asked=asked,
        error=answer.error,
        contact=answer.contact,
        failures=known.failures + 1 if answer.error is not None else 0,
        took_s=took_s,
        credit_s=credit_s - took_s,
    )
    return known if answer.schedule is None else replace(known, schedule=answer.schedule, answered=asked)


def pause_s(known: CachedAnswer, interval_s: float, jitter: float) -> float:
    """Return how long Slurm is left alone after a try."""
    found_s = interval_s
    if known.failures:
        most_s = REFUSED_S if known.took_s < _CHEAP_S else BACK_OFF_S
        found_s = max(found_s, min(most_s, found_s * 2.0 ** min(known.failures - 1, 16))) * jitter
    return max(found_s, _rest_s(known))


def _rest_s(known: CachedAnswer) -> float:
    """Return how long it takes until what Slurm's commands took is no more than their share."""
    return max(0.0, -known.credit_s / SHARE)
