"""``memory://``: a dictionary with a size limit. For tests and for caches that need not outlive the process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from cachegen_rag.errors import StoreFullError, StoreUnavailableError
from cachegen_rag.stores.base import (
    DEFAULT_SIZE_LIMIT,
    MAX_OBJECT_BYTES,
    Namespace,
    check_deadline,
    check_name,
    check_object,
    check_size,
)


class MemoryStore:
    """Objects in this process. Beyond ``size_limit`` bytes the ones read or written longest ago are evicted."""

    url = "memory://"
    remote = False

    def __init__(self, *, size_limit: int = DEFAULT_SIZE_LIMIT) -> None:
        self.size_limit = size_limit
        self._objects: OrderedDict[str, bytes] | None = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore(size_limit={self.size_limit})"

    def get(
        self, namespace: Namespace, key: str, *, max_bytes: int = MAX_OBJECT_BYTES, deadline: float | None = None
    ) -> bytes | None:
        name = check_name(namespace, key)
        check_deadline(name, deadline)
        with self._lock:
            data = self._open().get(name)
            if data is not None:
                check_size(name, len(data), max_bytes)
                self._open().move_to_end(name)
            return data

    def put(self, namespace: Namespace, key: str, data: bytes, *, deadline: float | None = None) -> None:
        name = check_object(namespace, key, data)
        check_deadline(name, deadline)
        if len(data) > self.size_limit:
            raise StoreFullError(f"{name} has {len(data):,} bytes; the store's size_limit is {self.size_limit:,}")
        with self._lock:
            self._drop(name)
            self._open()[name] = data
            self._size += len(data)
            while self._size > self.size_limit:
                self._drop(next(iter(self._open())))

    def contains(self, namespace: Namespace, key: str) -> bool:
        name = check_name(namespace, key)
        with self._lock:
            return name in self._open()

    def delete(self, namespace: Namespace, key: str) -> bool:
        name = check_name(namespace, key)
        with self._lock:
            return self._drop(name)

    def keys(self, namespace: Namespace) -> Iterator[str]:
        with self._lock:
            names = list(self._open())
        return (name[len(namespace) + 1 :] for name in names if name.startswith(f"{namespace}/"))

    def size(self) -> int:
        with self._lock:
            self._open()
            return self._size

    def close(self) -> None:
        with self._lock:
            self._objects, self._size = None, 0

    def _open(self) -> OrderedDict[str, bytes]:
        if self._objects is None:
            raise StoreUnavailableError("this memory:// store is closed")
        return self._objects

    def _drop(self, name: str) -> bool:
        data = self._open().pop(name, None)
        self._size -= len(data or b"")
        return data is not None
