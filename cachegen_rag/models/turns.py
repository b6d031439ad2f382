"""Turns: a lock that serves whoever waits in the order they came."""

from __future__ import annotations

import threading
from collections import deque

from cachegen_rag.errors import ModelError

PATIENCE = 2.0
"""Seconds that a thread waits for a turn that it took itself, in case another thread reads the answer on."""


class Turns:
    """First come, first served. Unlike ``threading.Lock``, a busy thread cannot overtake the ones that wait.

    The guard is reentrant and held over no step between reading and changing that allocates: the garbage collector may
    end a forgotten session, and so release its turn, at any allocation of this thread.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._waiting: deque[threading.Event] = deque()
        self._owner: int | None = None

    def acquire(self, timeout: float | None = None, *, patience: float = PATIENCE) -> bool:
        """Wait for the turn, at most ``timeout`` seconds; whether it came.

        Raises ModelError instead of waiting for ever when this thread itself has the turn (an unfinished stream) and
        no other thread goes on with it (see :meth:`here`) within ``patience`` seconds.
        """
        me = threading.get_ident()
        turn = threading.Event()
        with self._guard:
            mine = self._owner == me
            if self._owner is None:
                self._owner = me
                return True
            self._waiting.append(turn)
        try:
            stuck = mine and not turn.wait(patience if timeout is None else min(patience, timeout))
            stuck = stuck and self._owner == me
            if not stuck:
                turn.wait(timeout)
        except BaseException:  # KeyboardInterrupt while waiting
            if not self._leave(turn):
                self.release()
            raise
        if not turn.is_set() and self._leave(turn):
            if stuck:
                raise ModelError(
                    "this thread already has a session of this model open; "
                    "finish or close it (or its answer stream) before the next one"
                )
            return False
        self._owner = me
        return True

    def here(self) -> None:
        """The turn is this thread's from now on: a stream may be read by changing threads. Whoever has it calls it."""
        with self._guard:
            if self._owner:  # not one that nobody has, nor one that is promised
                self._owner = threading.get_ident()

    def _leave(self, turn: threading.Event) -> bool:
        """Wait no longer; False if the turn has come meanwhile."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return True
            return False

    def release(self) -> None:
        """Pass the turn on. Any thread may do it: a generator can be closed by another thread than started it."""
        with self._guard:
            if self._waiting:
                self._owner = 0  # promised to a thread that has yet to wake up
                self._waiting.popleft().set()
            else:
                self._owner = None
