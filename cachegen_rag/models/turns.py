"""Turns: a lock that serves whoever waits in the order they came."""

from __future__ import annotations

import threading
from collections import deque

from cachegen_rag.errors import ModelError


class Turns:
    """First come, first served. Unlike ``threading.Lock``, a busy thread cannot overtake the ones that wait."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._owner: int | None = None

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait for the turn, at most ``timeout`` seconds; whether it came.

        Raises ModelError instead of waiting for ever when this thread itself has the turn (an unfinished stream).
        """
        me = threading.get_ident()
        with self._guard:
            if self._owner == me:
                raise ModelError(
                    "this thread already has a session of this model open; "
                    "finish or close it (or its answer stream) before the next one"
                )
            if self._owner is None:
                self._owner = me
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait(timeout)
        except BaseException:  # KeyboardInterrupt while waiting
            if not self._leave(turn):
                self.release()
            raise
        if not turn.is_set() and self._leave(turn):
            return False
        with self._guard:
            self._owner = me
        return True

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
