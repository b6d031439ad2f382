"""Objects read from a remote store before the request that needs them: the retriever already knows which they are."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cachegen_rag.stores.base import MAX_OBJECT_BYTES, Namespace, Store

AHEAD_BYTES = 64 << 20
"""Bytes that may be kept or on their way ahead of requests; beyond it the oldest are given up."""
AHEAD_SECONDS = 60.0
"""How long an object is kept for the request it was read for."""
MANIFEST_BYTES = 16 << 10
"""What a manifest counts for before its size is known."""


@dataclass
class _Read:
    future: Future[bytes | None]
    size: int
    since: float
    listeners: list[Callable[[int], None]] = field(default_factory=list)


class Ahead:
    """A remote store as requests see it: what was read ahead is handed over, once; everything else is fetched.

    ``store`` is a FetchStore. Objects are verified by whoever takes them, as always.
    """

    remote = True

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        self._lock = threading.Lock()
        self._reads: OrderedDict[tuple[Namespace, str], _Read] = OrderedDict()

    @property
    def url(self) -> str:
        """The store's URL."""
        return str(self._store.url)

    def prefetch(self, namespace: Namespace, key: str, size: int = MANIFEST_BYTES) -> Future[bytes | None]:
        """Start reading an object of ``size`` bytes (a manifest: any), unless it is on its way. Raises StoreError."""
        with self._lock:
            self._expire()
            read = self._reads.get((namespace, key))
            if read is None:
                listeners: list[Callable[[int], None]] = []

                def arrived(count: int) -> None:
                    for listener in listeners:
                        listener(count)

                limit = MAX_OBJECT_BYTES if namespace == "ac" else size
                future = self._store.fetch(namespace, key, max_bytes=limit, on_bytes=arrived)
                read = self._reads[namespace, key] = _Read(future, size, time.monotonic(), listeners)
            while sum(r.size for r in self._reads.values()) > AHEAD_BYTES and len(self._reads) > 1:
                self._reads.popitem(last=False)[1].future.cancel()
            return read.future

    def fetch(
        self,
        namespace: Namespace,
        key: str,
        *,
        max_bytes: int = MAX_OBJECT_BYTES,
        deadline: float | None = None,
        priority: float = math.inf,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Future[bytes | None]:
        """See :class:`~cachegen_rag.stores.base.FetchStore`; what failed ahead is tried anew."""
        read = self._take(namespace, key)
        if read is not None:
            if on_bytes is not None:
                read.listeners.append(on_bytes)
            return read.future
        future: Future[bytes | None] = self._store.fetch(
            namespace, key, max_bytes=max_bytes, deadline=deadline, priority=priority, on_bytes=on_bytes
        )
        return future

    def get(
        self, namespace: Namespace, key: str, *, max_bytes: int = MAX_OBJECT_BYTES, deadline: float | None = None
    ) -> bytes | None:
        """See :class:`~cachegen_rag.stores.base.Store`."""
        read = self._take(namespace, key)
        if read is not None and read.future.done():
            return read.future.result()
        store: Store = self._store
        return store.get(namespace, key, max_bytes=max_bytes, deadline=deadline)

    def has_local(self, namespace: Namespace, key: str) -> bool:
        """Whether reading the object needs no network."""
        with self._lock:
            read = self._reads.get((namespace, key))
            if read is not None and read.future.done() and not _failed(read.future):
                return True
        local = getattr(self._store, "has_local", None)
        return local is not None and bool(local(namespace, key))

    def _take(self, namespace: Namespace, key: str) -> _Read | None:
        with self._lock:
            self._expire()
            read = self._reads.pop((namespace, key), None)
        return None if read is None or _failed(read.future) else read

    def _expire(self) -> None:
        oldest = time.monotonic() - AHEAD_SECONDS
        while self._reads and next(iter(self._reads.values())).since < oldest:
            self._reads.popitem(last=False)[1].future.cancel()


def _failed(future: Future[bytes | None]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None or future.result() is None)
