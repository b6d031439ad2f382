"""The ``Store`` protocol and ``open_store``. A store keeps immutable bytes under names and never sees a tensor.

Two namespaces, as in Bazel's HTTP cache: ``cas`` holds objects named by the SHA-256 of their bytes (bitstreams,
profiles), ``ac`` holds manifests named by a document's content key. An object in ``cas`` never changes; one in
``ac`` may be replaced by a newer manifest of the same document.

Reading order: this file, ``memory.py`` (the protocol in its plainest form), ``disk.py``, ``http.py``, ``tiered.py``.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable
from urllib.parse import unquote, urlsplit

from cachegen_rag.errors import ConfigError, CorruptBitstreamError, DeadlineExceededError

Namespace = Literal["cas", "ac"]
NAMESPACES: tuple[Namespace, ...] = get_args(Namespace)

MAX_OBJECT_BYTES = 1 << 30
"""Upper limit of one object, checked before anything is read or allocated."""

DEFAULT_SIZE_LIMIT = 20 << 30
"""Bytes that a local store keeps unless told otherwise; beyond it the objects read longest ago are evicted."""

_KEY = re.compile(r"[0-9a-f]{64}\Z")


def check_key(key: str) -> str:
    """Return ``key`` if it is 64 lower-case hex digits; raise ConfigError otherwise."""
    if not isinstance(key, str) or not _KEY.match(key):
        raise ConfigError(f"a store key is 64 lower-case hex digits, got {key!r:.100}")
    return key


def check_name(namespace: str, key: str) -> str:
    """Return ``namespace/key``; raise ConfigError if either is not what a store accepts."""
    if namespace not in NAMESPACES:
        raise ConfigError(f"a store namespace is one of {', '.join(NAMESPACES)}, got {namespace!r:.40}")
    return f"{namespace}/{check_key(key)}"


def check_object(namespace: str, key: str, data: bytes) -> str:
    """Return ``namespace/key`` for an object that may be put there; raise ConfigError otherwise.

    The hash of a ``cas`` object is checked here, so that no store can be made to hold bytes under a wrong name.
    """
    name = check_name(namespace, key)
    if not isinstance(data, bytes):
        raise ConfigError(f"a store keeps bytes, got {type(data).__name__}")
    if len(data) > MAX_OBJECT_BYTES:
        raise ConfigError(f"{name} has {len(data):,} bytes; an object may have {MAX_OBJECT_BYTES:,}")
    if namespace == "cas" and hashlib.sha256(data).hexdigest() != key:
        raise ConfigError(f"{name} must be named by the SHA-256 of its bytes, {hashlib.sha256(data).hexdigest()}")
    return name


def check_size(name: str, size: int, max_bytes: int) -> None:
    """Raise CorruptBitstreamError if an object is larger than the reader asked for."""
    if size > max_bytes:
        raise CorruptBitstreamError(f"{name} has {size:,} bytes where at most {max_bytes:,} were expected")


def check_deadline(name: str, deadline: float | None) -> None:
    """Raise DeadlineExceededError if ``deadline`` (``time.monotonic()``) has passed."""
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceededError(f"the deadline passed before {name} was read")


class Store(Protocol):
    """Where bitstreams and manifests are kept. Thread-safe; several processes may share one.

    ``deadline`` is a ``time.monotonic()`` value; None waits as long as the store's own limits allow.
    A name that is not a namespace and 64 hex digits is a ConfigError everywhere.
    """

    @property
    def url(self) -> str:
        """The URL this store was opened with, without credentials."""

    @property
    def remote(self) -> bool:
        """Whether reading crosses a network, so that choosing what to read and when is worth a thought."""

    def get(
        self, namespace: Namespace, key: str, *, max_bytes: int = MAX_OBJECT_BYTES, deadline: float | None = None
    ) -> bytes | None:
        """The object, or None if it is not there. The bytes are not verified: the caller does that.

        Raises StoreUnavailableError, DeadlineExceededError, or CorruptBitstreamError beyond ``max_bytes``.
        """

    def put(self, namespace: Namespace, key: str, data: bytes, *, deadline: float | None = None) -> None:
        """Store the object, whole or not at all. Raises StoreUnavailableError, StoreFullError.

        A ``cas`` object whose SHA-256 is not ``key`` is a ConfigError.
        """

    def contains(self, namespace: Namespace, key: str) -> bool:
        """Whether the object is there."""

    def delete(self, namespace: Namespace, key: str) -> bool:
        """Remove the object; False if it was not there."""

    def keys(self, namespace: Namespace) -> Iterator[str]:
        """All keys of a namespace, in no order. A remote store may not be able to list: StoreError."""

    def size(self) -> int:
        """Bytes stored. A remote store may not be able to tell: StoreError."""

    def close(self) -> None:
        """Release files and connections. Idempotent. A closed store raises StoreUnavailableError."""


@runtime_checkable
class FetchStore(Protocol):
    """A remote store that reads in the background and tells how the bytes arrive. ``http.py`` and ``tiered.py``."""

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
        """Start reading an object. The future ends like ``Store.get``; cancelling it ends the transfer.

        Where reads wait for each other, the lowest ``priority`` comes first: a deadline makes that earliest deadline
        first across all requests that share the store.
        ``on_bytes(n)`` is called from the network thread for every piece of ``n`` bytes that arrives, and with 0 when
        the response's head has arrived. It must not block.
        """


def open_store(url: str | Path, *, size_limit: int = DEFAULT_SIZE_LIMIT, **options: Any) -> Any:
    """Open the store that ``url`` names.

    ``memory://``              in this process, gone when closed
    ``file:///path`` or a path a directory, made if it is not there (see ``disk.py``)
    ``https://host/base``      a remote store, ``http://`` on loopback only (see ``http.py`` for ``token=`` and others)

    ``size_limit`` is in bytes, of a local store; for a remote one it bounds the directory given as ``tier=PATH``, in
    which objects read from the remote store are kept (see ``tiered.py`` for ``write_back=``).

    Raises ConfigError for a URL that names no store, StoreUnavailableError if it cannot be opened, StoreFormatError if
    a newer version of this package wrote it.
    """
    if isinstance(size_limit, bool) or not isinstance(size_limit, int) or size_limit <= 0:
        raise ConfigError(f"size_limit is a number of bytes above 0, got {size_limit!r}")
    if not isinstance(url, (str, Path)):
        raise ConfigError(f"a store is named by a URL or a path, got {type(url).__name__}")
    text = str(url)
    if "\0" in text or "%00" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError("the store's URL or path holds NUL characters or lone surrogates")
    scheme = text.partition(":")[0].lower() if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text) else ""
    if scheme in ("http", "https"):
        return _open_remote(text, size_limit, options)
    if options:
        raise ConfigError(f"{', '.join(sorted(options))}: options of a remote store, given with a local one")
    if scheme == "memory":
        if text[len("memory:") :] not in ("", "//"):
            raise ConfigError("a memory store has no name: it is memory://, and gone when closed")
        from cachegen_rag.stores.memory import MemoryStore

        return MemoryStore(size_limit=size_limit)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise ConfigError("a file store is file:///absolute/path, without host, query or fragment, or a plain path")
        text = unquote(parts.path)
    elif scheme:
        raise ConfigError(f"no store has the scheme {scheme}://; known are memory://, file://, https://, http://")
    if not text:
        raise ConfigError("the store's path is empty")
    from cachegen_rag.stores.disk import DiskStore

    return DiskStore(text, size_limit=size_limit)


def _open_remote(url: str, size_limit: int, options: dict[str, Any]) -> Any:
    from cachegen_rag.stores.http import HTTPStore

    known = {"tier", "write_back", *inspect.signature(HTTPStore).parameters} - {"url"}
    if unknown := sorted(options.keys() - known):
        raise ConfigError(f"{', '.join(unknown)}: no such option of a remote store; it has {', '.join(sorted(known))}")
    tier, write_back = options.pop("tier", None), options.pop("write_back", False)
    if not (tier is None or isinstance(tier, (str, Path))):
        raise ConfigError(f"tier is the path of a directory, got {tier!r:.80}")
    if not isinstance(write_back, bool) or (write_back and tier is None):
        raise ConfigError(f"write_back is True or False and needs tier=, got {write_back!r:.80}")
    remote = HTTPStore(url, **options)
    if tier is None:
        return remote
    from cachegen_rag.stores.disk import DiskStore
    from cachegen_rag.stores.tiered import TieredStore

    return TieredStore(DiskStore(tier, size_limit=size_limit), remote, write_back=write_back)
