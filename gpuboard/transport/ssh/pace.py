"""How many ssh connections are set up at once: fewer where each takes long, however many of them hang."""

from __future__ import annotations

import asyncio
import math
from collections import deque

AT_ONCE = 8  # under way to begin with; each that succeeds in time makes room for one more
LEAST = 4
SLOW_S = 1.0  # from the start of an attempt to the agent's first words: a success that took longer took long…
FAR = 10.0  # …unless even the quickest first answer of a server takes a tenth of that: then it is the way that is long
OVERTAKEN = 8  # an attempt without progress while so many succeed hangs, and is in nobody's way
QUIET_S = 0.1  # without any progress for so long all of them wait for something far away, or hang: one more may begin
STARTING_S = 1.0  # the same where an agent is being started: that shows no progress


class Turn:
    """An attempt under way."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.began = pace.now()
        self.mark = pace.succeeded  # how many attempts had succeeded when this one made progress last
        self.starting = False  # its connection stands, its agent has not begun

    def progress(self) -> None:
        """Take note that the other end has answered something."""
        self._pace.near_s = min(self._pace.near_s, self._pace.now() - self.began)
        self.mark = self._pace.succeeded
        self._pace.moved = self._pace.now()


class Pace:
    """Lets attempts in, the oldest first; at most ``most`` at once. Used in one event loop."""

    def __init__(self, most: int, slow_s: float = SLOW_S) -> None:
        self._most = most
        self._slow_s = slow_s
        self._took_s = 0.0  # by those that succeeded, the newest above all
        self._turns: set[Turn] = set()
        self._waiting: deque[asyncio.Future[Turn]] = deque()
        self._quiet: asyncio.Task[None] | None = None
        self.at_once = float(min(most, AT_ONCE))  # how many may be under way, of those that do not hang
        self.succeeded = 0
        self.near_s = math.inf  # until the quickest first answer
        self.moved = 0.0  # when any attempt made progress last

    @staticmethod
    def now() -> float:
        """Return the time by the running loop's clock."""
        return asyncio.get_running_loop().time()

    async def enter(self) -> Turn:
        """Wait for one's turn; whoever got it calls ``leave``."""
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._let_in()
        if self._waiting and (self._quiet is None or self._quiet.done()):
            self._quiet = asyncio.create_task(self._when_quiet())
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(future.result(), succeeded=False)
            raise

    def leave(self, turn: Turn, *, succeeded: bool) -> None:
        """End a turn."""
        self._turns.discard(turn)
        if succeeded:
            took_s = self.now() - turn.began
            self._took_s += (took_s - self._took_s) / 4
            slow = took_s > max(self._slow_s, FAR * self.near_s)
            self.at_once = max(LEAST, self.at_once - 1) if slow else min(self._most, self.at_once + 1)
            self.succeeded += 1
            self.moved = self.now()
        self._let_in()

    def _let_in(self, more: int = 0) -> None:
        """Let in as many as there is room for, and ``more``."""
        moving = sum(self.succeeded - turn.mark < OVERTAKEN for turn in self._turns)
        room = max(int(self.at_once) - moving, more)
        while self._waiting and room > 0 and len(self._turns) < self._most:
            future = self._waiting.popleft()
            if not future.done():  # it was cancelled
                turn = Turn(self)
                self._turns.add(turn)
                future.set_result(turn)
                room -= 1

    async def _when_quiet(self) -> None:
        while self._waiting:
            starting = any(turn.starting for turn in self._turns)
            quiet_s = max(STARTING_S if starting else QUIET_S, self._took_s / self.at_once)
            await asyncio.sleep(quiet_s)
            self._let_in(more=1 if self.now() - self.moved >= quiet_s else 0)
