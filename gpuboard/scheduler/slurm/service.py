"""The Slurm service: a few commands per cycle, with answers shared by all processes of a user."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from gpuboard.config import Settings
from gpuboard.model.schedule import Seen
from gpuboard.model.units import parse_duration
from gpuboard.scheduler.base import QUERY_S
from gpuboard.scheduler.slurm.cache import Cache, CachedAnswer, now
from gpuboard.scheduler.slurm.query_cycle import CycleResult, QueryCycle
from gpuboard.scheduler.slurm.site import Site, here, key


class SlurmTiming(msgspec.Struct, frozen=True):
    """When Slurm is queried. All but ``share`` in seconds."""

    cycle_s: float = 12.0  # timeout of one cycle's commands together; Slurm's own commands give up after 10 s
    share: float = 0.05  # token bucket: at most 5 % of wall time in Slurm commands…
    credit_s: float = 15.0  # …burst 15 s: the share of five minutes
    current_s: float = 30.0  # an answer counts as current for at least this long
    backoff_most_s: float = 300.0
    backoff_cheap_most_s: float = 60.0  # the same if a failed cycle costs little: the connection is refused at once
    cheap_s: float = 0.5  # a cycle with less time than this in Slurm's commands costs little
    stuck_s: float = 13.0  # longest wait for another process that queries: after more than a cycle it is suspended
    news_s: float = 2.0  # between two checks of the shared file for other processes' answers
    poll_s: float = 0.05  # the same while another process queries


TIMING = SlurmTiming()
_WAITING = "another of your gpuboard processes is waiting for its answer"


def outdate(env: Mapping[str, str]) -> None:
    """Mark the shared answer as outdated after a command changed a job: the next query is due as soon as allowed."""
    Cache(env, key(here(env), env)).outdate()


class Slurm:
    """Implements scheduler/base.py. For any thread."""

    def __init__(self, settings: Settings, env: Mapping[str, str], site: Site, timing: SlurmTiming = TIMING) -> None:
        self._interval_s = parse_duration(settings.slurm.interval)
        self._timing = timing
        self._cache = Cache(env, key(site, env))
        self._cycle = QueryCycle(site, env)
        self._lock = threading.Lock()  # held while this process queries
        self._ended = threading.Event()
        self._known = CachedAnswer(self._cache.boot, credit_s=timing.credit_s)
        self._jitter = 0.8 + 0.4 * os.urandom(1)[0] / 255  # spreads the clients of a controller that comes back

    @property
    def seen(self) -> Seen:
        """What is known now; from any thread, without waiting."""
        known = self._known
        current_s = max(
            self._timing.current_s, 3 * self._interval_s, _rest_s(known, self._timing) + self._timing.cycle_s
        )
        return Seen(known.schedule, time.monotonic() - (now() - known.answered), known.error, current_s)

    def start(self, changed: Callable[[], None]) -> None:
        """Query from a thread until closed; ``changed`` is called after each answer or error."""
        threading.Thread(target=self._keep, args=(changed,), name="slurm", daemon=True).start()

    def look(self, timeout_s: float = QUERY_S, *, retry: bool = False) -> Seen:
        """Query once if the newest shared answer is too old, waiting at most ``timeout_s``; return what is known.

        ``retry``: also if there is only an error from before this call, as soon as the token bucket allows.
        """
        self._refresh(time.monotonic() + timeout_s, now() if retry else 0.0)
        return self.seen

    def close(self) -> None:
        """Stop querying at once; does not wait for a command that hangs."""
        self._ended.set()
        self._cycle.stop()

    def _keep(self, changed: Callable[[], None]) -> None:
        while not self._ended.is_set():
            before = self._known
            self._refresh(time.monotonic() + 2 * self._timing.cycle_s)
            if self._known is not before and not self._ended.is_set():
                changed()
            self._ended.wait(min(self._timing.news_s, max(self._due_s(), 10 * self._timing.poll_s)))

    def _refresh(self, deadline: float, retry_at: float = 0.0) -> None:
        """Take another process's answer if it is new enough, else query. ``retry_at``: see ``_due_s``."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        try:
            begun = time.monotonic()
            while not self._ended.is_set() and self._adopt(retry_at) > 0:
                stuck = time.monotonic() - begun > self._timing.stuck_s  # SIGTSTP
                with self._cache.turn() as locked:
                    if locked or stuck:
                        if self._adopt(retry_at) > 0:
                            self._ask(min(self._timing.cycle_s, deadline - time.monotonic()))
                        return
                if time.monotonic() >= deadline:
                    if self._known.schedule is None and self._known.error is None:
                        self._known = replace(self._known, error=_WAITING)
                    return
                self._ended.wait(self._timing.poll_s)
        finally:
            self._lock.release()

    def _adopt(self, retry_at: float) -> float:
        """Take a newer answer from the file; return how long the next query is overdue."""
        stored = self._cache.load()
        known = self._known
        if stored is not None and stored.asked > known.asked:
            if stored.schedule is None:
                stored = replace(stored, schedule=self._known.schedule, answered=self._known.answered)
            self._known = stored
        return -self._due_s(retry_at)

    def _due_s(self, retry_at: float = 0.0) -> float:
        """Return when the next query is due. With no answer yet, an error from before ``retry_at`` is no delay."""
        known = self._known
        if known.asked == 0:
            return -1.0
        outdated = self._cache.outdated > known.asked and known.schedule is not None and not known.failures
        if outdated or (known.schedule is None and known.asked < retry_at):
            return known.asked + known.took_s + _rest_s(known, self._timing) - now()
        return known.asked + known.took_s + pause_s(known, self._interval_s, self._jitter, self._timing) - now()

    def _ask(self, timeout_s: float) -> None:
        known = self._known
        asked = now()
        answer = self._cycle.ask(timeout_s, probe=known.failures > 0 and known.contact, before=known.schedule)
        if self._ended.is_set():
            return  # close() killed the command
        self._known = after(known, answer, asked, self._cycle.took_s, self._timing)
        self._cache.store(self._known)


def after(
    known: CachedAnswer, answer: CycleResult, asked: float, took_s: float, timing: SlurmTiming = TIMING
) -> CachedAnswer:
    """Return what is known after a query that began at ``asked`` and took ``took_s`` in Slurm's commands."""
    credit_s = timing.credit_s
    if known.asked:
        credit_s = min(credit_s, known.credit_s + timing.share * (asked - known.asked))
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


def pause_s(known: CachedAnswer, interval_s: float, jitter: float, timing: SlurmTiming = TIMING) -> float:
    """Return the pause after a query."""
    found_s = interval_s
    if known.failures:
        most_s = timing.backoff_cheap_most_s if known.took_s < timing.cheap_s else timing.backoff_most_s
        found_s = max(found_s, min(most_s, found_s * 2.0 ** min(known.failures - 1, 16))) * jitter
    return max(found_s, _rest_s(known, timing))


def _rest_s(known: CachedAnswer, timing: SlurmTiming) -> float:
    """Return how long the token bucket takes to refill to zero."""
    return max(0.0, -known.credit_s / timing.share)
