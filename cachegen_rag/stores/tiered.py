"""A disk store in front of a remote one: what was read or written once is at hand the next time.

Write-through (the default): ``put`` returns when both have the object. Write-back: when the disk has it; a thread
uploads in the order of the puts, so that a manifest never arrives before what it names. What a process could not upload
before it ended, ``sync()`` of a later one does.
"""

from __future__ import annotations

import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from cachegen_rag.errors import CacheGenError, StoreError, StoreUnavailableError
from cachegen_rag.stores.base import (
    MAX_OBJECT_BYTES,
    NAMESPACES,
    Namespace,
    check_deadline,
    check_name,
    check_object,
    check_size,
)
from cachegen_rag.stores.disk import DiskStore
from cachegen_rag.stores.http import HTTPStore

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
"""Bytes that may wait for upload; a ``put`` beyond it waits for room."""
CLOSE_SECONDS = 30.0
"""How long ``close`` waits for uploads."""


class TieredStore:
    """``local`` in front of ``remote``; both are closed with it.

    Reads ask ``local`` first, then ``remote``, and keep what came from there. A ``cas`` object whose bytes do not match
    its name is handed on but not kept. Deleting deletes in both.
    """

    remote = True

    def __init__(self, local: DiskStore, remote: HTTPStore, *, write_back: bool = False) -> None:
        self.local, self.far = local, remote
        self.url = remote.url
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="cachegen-tier")
        self._closed = False
        self._uploads = _Uploads(local, remote) if write_back else None

    def __repr__(self) -> str:
        return f"TieredStore({self.url!r}, tier={self.local.directory!r}, write_back={self._uploads is not None})"

    def get(
        self, namespace: Namespace, key: str, *, max_bytes: int = MAX_OBJECT_BYTES, deadline: float | None = None
    ) -> bytes | None:
        self._check(namespace, key, deadline)
        data = self._near(namespace, key, max_bytes)
        if data is None:
            data = self.far.get(namespace, key, max_bytes=max_bytes, deadline=deadline)
            self._keep(namespace, key, data)
        return data

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
        """Start reading an object; see :class:`~cachegen_rag.stores.base.FetchStore`."""
        self._check(namespace, key, deadline)
        data = self._near(namespace, key, max_bytes)
        if data is not None:
            done: Future[bytes | None] = Future()
            done.set_result(data)
            return done
        future = self.far.fetch(
            namespace, key, max_bytes=max_bytes, deadline=deadline, priority=priority, on_bytes=on_bytes
        )
        future.add_done_callback(lambda f: self._keep_later(namespace, key, f))
        return future

    def put(self, namespace: Namespace, key: str, data: bytes, *, deadline: float | None = None) -> None:
        check_object(namespace, key, data)
        self._check(namespace, key, deadline)
        self.local.put(namespace, key, data)
        if self._uploads is not None:
            self._uploads.add(namespace, key, len(data))
        else:
            self.far.put(namespace, key, data, deadline=deadline)

    def contains(self, namespace: Namespace, key: str) -> bool:
        """Whether the object is where ``put`` puts it: at the remote store, or waiting here to get there."""
        self._check(namespace, key)
        if self._uploads is not None and self.local.contains(namespace, key):
            return True
        return self.far.contains(namespace, key)

    def has_local(self, namespace: Namespace, key: str) -> bool:
        """Whether reading the object needs no network."""
        self._check(namespace, key)
        return self.local.contains(namespace, key)

    def delete(self, namespace: Namespace, key: str) -> bool:
        self._check(namespace, key)
        near = self.local.delete(namespace, key)
        return self.far.delete(namespace, key) or near

    def keys(self, namespace: Namespace) -> Iterator[str]:
        return self.far.keys(namespace)

    def size(self) -> int:
        return self.far.size()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits for upload; False if ``timeout`` seconds were not enough."""
        return self._uploads is None or self._uploads.flush(timeout)

    def sync(self) -> int:
        """Upload what the local store has and the remote one lacks, bitstreams first; the number of objects."""
        sent = 0
        for namespace in NAMESPACES:
            for key in list(self.local.keys(namespace)):
                if not self.far.contains(namespace, key):
                    data = self.local.get(namespace, key)
                    if data is not None and _matches(namespace, key, data):
                        self.far.put(namespace, key, data)
                        sent += 1
        return sent

    def close(self) -> None:
        if self._closed:
            return
        if self._uploads is not None:
            self._uploads.close()
        self._closed = True
        self._keeper.shutdown()
        self.far.close()
        self.local.close()

    def _check(self, namespace: str, key: str, deadline: float | None = None) -> None:
        if self._closed:
            raise StoreUnavailableError(f"the store at {self.url} is closed")
        check_deadline(check_name(namespace, key), deadline)

    def _near(self, namespace: Namespace, key: str, max_bytes: int) -> bytes | None:
        # The remote store is asked for what the local one cannot give, damaged objects included.
        try:
            data = self.local.get(namespace, key)
        except CacheGenError:
            return None
        if data is None or not _matches(namespace, key, data):
            return None
        check_size(f"{namespace}/{key}", len(data), max_bytes)
        return data

    def _keep_later(self, namespace: Namespace, key: str, future: Future[bytes | None]) -> None:
        if not future.cancelled() and future.exception() is None:
            with suppress(RuntimeError):  # closed meanwhile
                self._keeper.submit(self._keep, namespace, key, future.result())

    def _keep(self, namespace: Namespace, key: str, data: bytes | None) -> None:
        if data is not None and _matches(namespace, key, data):
            try:
                self.local.put(namespace, key, data)
            except StoreError as error:
                log.warning("not kept locally: %s", error)


class _Uploads:
    """Puts in their order, sent by one thread. After a failure it waits and tries the same object again."""

    def __init__(self, local: DiskStore, remote: HTTPStore) -> None:
        self._local, self._remote = local, remote
        self._queue: queue.SimpleQueue[tuple[Namespace, str, int] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._bytes = 0
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cachegen-upload", daemon=True)
        self._thread.start()

    def add(self, namespace: Namespace, key: str, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._bytes == 0 or self._bytes + size <= QUEUE_BYTES or self._stop.is_set())
            self._waiting += 1
            self._bytes += size
        self._queue.put((namespace, key, size))

    def flush(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting == 0, timeout)

    def close(self) -> None:
        if not self.flush(CLOSE_SECONDS):
            log.warning("%d objects were not uploaded to %s; sync() sends them", self._waiting, self._remote.url)
        self._stop.set()
        self._queue.put(None)
        self._thread.join(timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            namespace, key, size = item
            pause = 0.2
            while not self._stop.is_set() and not self._send(namespace, key):
                self._stop.wait(pause)
                pause = min(2 * pause, 10.0)
            with self._changed:
                self._waiting -= 1
                self._bytes -= size
                self._changed.notify_all()

    def _send(self, namespace: Namespace, key: str) -> bool:
        try:
            data = self._local.get(namespace, key)
            if data is not None:
                self._remote.put(namespace, key, data, deadline=time.monotonic() + 60.0)
        except StoreError as error:
            log.warning("not uploaded yet: %s", error)
            return False
        return True


def _matches(namespace: str, key: str, data: bytes) -> bool:
    return namespace != "cas" or hashlib.sha256(data).hexdigest() == key
