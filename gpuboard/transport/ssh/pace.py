"""How many ssh connections are set up at once: fewer where each takes long; connections that hang do not count."""

from __future__ import annotations

import asyncio
import math
from collections import deque

AT_ONCE = 8  # attempts at the start; each that succeeds in time adds one
LEAST = 4
SLOW_S = 1.0  # from the start of an attempt to the agent's first output: a success that took longer is slow…
FAR = 10.0  # …unless even the fastest server's first reply took a tenth of that: then the network is slow
OVERTAKEN = 8  # an attempt without progress while this many succeed hangs, and no longer counts
QUIET_S = 0.1  # without progress of any attempt for this long, all of them wait or hang: one more may start
STARTING_S = 1.0  # the same while an agent starts, which shows no progress


class Turn:
    """A running attempt."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.began = pace.now()
        self.mark = pace.succeeded  # how many attempts had succeeded at this one's last progress
        self.starting = False  # it is connected, and its agent has not started yet

    def progress(self) -> None:
        """Record that the server has sent something."""
        self._pace.near_s = min(self._pace.near_s, self._pace.now() - self.began)
        self.mark = self._pace.succeeded
        self._pace.progress_at = self._pace.now()


class Pace:
    """Admits attempts in order of arrival, at most ``most`` at once. Used in one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._took_s = 0.0  # duration of successful attempts, moving average
        self._turns: set[Turn] = set()
        self._waiting: deque[asyncio.Future[Turn]] = deque()
        self._quiet: asyncio.Task[None] | None = None
        self.at_once = float(min(most, AT_ONCE))  # how many may run, besides those that hang
        self.succeeded = 0
        self.near_s = math.inf  # fastest first reply of a server
        self.progress_at = 0.0  # the last progress of any attempt

    @staticmethod
    def now() -> float:
        """Return the time by the running loop's clock."""
        return asyncio.get_running_loop().time()

    async def enter(self) -> Turn:
        """Wait for a turn; the caller ends it with ``leave``."""
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._admit()
        if self._waiting and (self._quiet is None or self._quiet.done()):
            self._quiet = asyncio.create_task(self._admit_when_quiet())
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(future.result(), succeeded=False)
            raise

    def leave(self, turn: Turn, *, succeeded: bool) -> None:
        self._turns.discard(turn)
        if succeeded:
            took_s = self.now() - turn.began
            self._took_s += (took_s - self._took_s) / 4
            slow = took_s > max(SLOW_S, FAR * self.near_s)
            self.at_once = max(LEAST, self.at_once - 1) if slow else min(self._most, self.at_once + 1)
            self.succeeded += 1
            self.progress_at = self.now()
        self._admit()

    def _admit(self, more: int = 0) -> None:
        """Admit attempts up to the limit, and at least ``more``."""
        moving = sum(self.succeeded - turn.mark < OVERTAKEN for turn in self._turns)
        room = max(int(self.at_once) - moving, more)
        while self._waiting and room > 0 and len(self._turns) < self._most:
            future = self._waiting.popleft()
            if not future.done():  # else it was cancelled
                turn = Turn(self)
                self._turns.add(turn)
                future.set_result(turn)
                room -= 1

    async def _admit_when_quiet(self) -> None:
        while self._waiting:
            starting = any(turn.starting for turn in self._turns)
            quiet_s = max(STARTING_S if starting else QUIET_S, self._took_s / self.at_once)
            await asyncio.sleep(quiet_s)
            self._admit(more=1 if self.now() - self.progress_at >= quiet_s else 0)
