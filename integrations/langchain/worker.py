"""One worker thread a model: requests run in the order they came, and a slow reader never holds the model.

A request is an iterator that runs on the worker; its items reach the caller, a thread or a task, through a queue.
Whoever stops reading (``close()``, a cancelled task, a deadline) sets a flag. The iterator's maker is given a function
that tells whether it is set, and the worker itself looks after each item.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Cancelled = Callable[[], bool]
Make = Callable[[Cancelled], Iterator[T | None]]
"""Makes the iterator of a request; a None it yields is not delivered."""

_END = object()


class _Job(Generic[T]):
    """A request: runs to its end, to its first error, or until it is cancelled."""

    def __init__(self, make: Make[T], deliver: Callable[[Any], None]) -> None:
        self._make, self._deliver = make, deliver
        self.cancelled = threading.Event()

    def run(self) -> None:
        items: Iterator[T | None] | None = None
        try:
            if self.cancelled.is_set():
                return
            items = self._make(self.cancelled.is_set)
            for item in items:
                if self.cancelled.is_set():
                    return
                if item is not None:
                    self._deliver((item, None))
        except BaseException as error:
            self._deliver((None, error))
        else:
            self._deliver((_END, None))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()


class Worker:
    """Runs requests one after the other, first come, first served."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cachegen")

    def stream(self, make: Make[T], timeout: float | None = None) -> Iterator[T]:
        """The items of ``make(cancelled)``. Raises what they raise, and TimeoutError after ``timeout`` seconds."""
        items: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        job = _Job(make, items.put)
        future = self._submit(job)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                try:
                    item, error = items.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError(f"the answer was not complete after {timeout} s") from None
                if error is not None:
                    raise error
                if item is _END:
                    return
                yield item
        finally:
            job.cancelled.set()
            future.cancel()

    async def astream(self, make: Make[T], timeout: float | None = None) -> AsyncIterator[T]:
        """Like :meth:`stream`, for a task. No thread waits while the request does."""
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()

        def deliver(item: tuple[Any, BaseException | None]) -> None:
            try:
                loop.call_soon_threadsafe(items.put_nowait, item)
            except RuntimeError:  # the loop was closed: nobody reads any more
                job.cancelled.set()

        job = _Job(make, deliver)
        future = self._submit(job)
        deadline = None if timeout is None else loop.time() + timeout
        try:
            while True:
                try:
                    left = None if deadline is None else max(0.0, deadline - loop.time())
                    item, error = await asyncio.wait_for(items.get(), left)
                except (TimeoutError, asyncio.TimeoutError):
                    raise TimeoutError(f"the answer was not complete after {timeout} s") from None
                if error is not None:
                    raise error
                if item is _END:
                    return
                yield item
        finally:
            job.cancelled.set()
            future.cancel()

    def _submit(self, job: _Job[Any]) -> Future[None]:
        return self._pool.submit(contextvars.copy_context().run, job.run)


_workers: weakref.WeakKeyDictionary[Any, Worker] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def worker_of(model: object) -> Worker:
    """The worker of a model: every chat model over the same engine shares it."""
    with _lock:
        worker = _workers.get(model)
        if worker is None:
            worker = _workers[model] = Worker()
        return worker
