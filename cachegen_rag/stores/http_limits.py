"""What keeps a client from hurting a server, or waiting for a dead one: slots, a retry budget, a circuit breaker."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

from cachegen_rag.errors import StoreUnavailableError


class Slots:
    """At most ``count`` holders at once; whoever waits with the lowest priority value (a deadline) comes next.

    Used from one event loop.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def hold(self, priority: float) -> AsyncIterator[None]:
        """Wait for a slot and keep it for the block."""
        if self._free > 0:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the slot was handed over in this very moment
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Health:
    """Whether a server is worth asking: after failures in a row it is left alone for a while, then probed once.

    Retries are paid from a budget that only first requests fill, so that under a full outage the server sees few more
    requests than without any retry (the "retry budget" of Google's SRE book, chapter 22). Thread-safe.
    """

    FAILURES = 3
    FIRST_REST, LONGEST_REST = 0.5, 30.0
    BUDGET, SHARE = 5.0, 0.1

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._rest_until = 0.0
        self._reason = ""
        self._budget = self.BUDGET

    def admit(self, where: str) -> None:
        """Raise StoreUnavailableError if the server is being left alone. Otherwise the request may be sent."""
        with self._lock:
            now = self._clock()
            if self._failures >= self.FAILURES:
                if now < self._rest_until:
                    raise StoreUnavailableError(
                        f"{where} failed {self._failures} times in a row (last: {self._reason}); "
                        f"it is asked again in {self._rest_until - now:.1f} s"
                    )
                self._rest_until = now + self._rest()  # one probe; the others wait for what becomes of it
            self._budget = min(self.BUDGET, self._budget + self.SHARE)

    def may_retry(self) -> bool:
        """Whether the budget holds a retry; takes it."""
        with self._lock:
            if self._budget < 1 or self._failures >= self.FAILURES:
                return False
            self._budget -= 1
            return True

    def succeeded(self) -> None:
        """The server answered as a healthy one does."""
        with self._lock:
            self._failures = 0

    def failed(self, reason: str) -> None:
        """A request failed for good."""
        with self._lock:
            self._failures += 1
            self._reason = reason
            self._rest_until = self._clock() + self._rest()

    def _rest(self) -> float:
        doublings = min(self._failures - self.FAILURES, 10)
        return min(self.LONGEST_REST, self.FIRST_REST * 2.0**doublings)
