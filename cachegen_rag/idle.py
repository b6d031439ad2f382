"""Work for idle time: it begins when no request has run for a moment, and a request that comes interrupts it."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cachegen_rag.errors import CacheGenError, RequestCancelledError

T = TypeVar("T")

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long no request may have run before work begins."""

MAX_WAITING = 256
"""Pieces of work that wait; the oldest are forgotten first."""

JOIN_SECONDS = 2.0
"""How long closing waits for work that does not notice that it is interrupted."""

Interrupted = Callable[[], bool]
Work = Callable[[Interrupted], None]
"""Asks now and then whether it is interrupted; then it raises RequestCancelledError and is done again later."""


class IdleWork:
    """Pieces of work by key, newest first, on a thread that lives only while there are any. Thread-safe.

    seconds : how long no request may have run before work begins.
    """

    def __init__(self, seconds: float = IDLE_SECONDS) -> None:
        self._seconds = seconds
        self._waiting: OrderedDict[str, Work] = OrderedDict()
        self._changed = threading.Condition(threading.RLock())  # reentrant: a collected stream ends at any allocation
        self._busy, self._since = 0, time.monotonic()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def request(self) -> Iterator[None]:
        """While this is open no work begins, and work under way is interrupted."""
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._since = time.monotonic()
                self._changed.notify_all()

    def during(self, items: Iterator[T]) -> Iterator[T]:
        """``items``, as a request: from the first that is asked for to the end."""
        with self.request():
            yield from items

    def add(self, key: str, work: Work) -> bool:
        """Do ``work`` when idle. False: work of this key waits already, or this is closed."""
        with self._changed:
            if self._closed:
                return False
            if key in self._waiting:
                self._waiting.move_to_end(key)
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="cachegen-idle", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the process ends
                    return False
                self._thread = thread
                atexit.register(self.close)  # before the engine is freed
            self._waiting[key] = work
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all work is done. False if ``timeout`` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self) -> None:
        """Interrupt the work under way, forget the rest. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def _interrupted(self) -> bool:
        return self._closed or self._busy > 0

    def _next(self) -> tuple[str, Work] | None:
        """Wait for idle time and take the newest work; None if none is left. The lock is held."""
        while self._waiting and not self._closed:
            left = self._since + self._seconds - time.monotonic()
            if not self._busy and left <= 0:
                return self._waiting.popitem()
            self._changed.wait(None if self._busy else left)
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                taken = self._next()
                if taken is None:
                    self._thread = None
                    atexit.unregister(self.close)
                    self._changed.notify_all()
                    return
            key, work = taken
            try:
                work(self._interrupted)
            except RequestCancelledError:
                with self._changed:
                    if not self._closed:
                        self._waiting.setdefault(key, work)
            except CacheGenError as error:
                log.info("work for idle time gave up: %s", error)
            except Exception:
                log.exception("work for idle time failed")
