"""The ``Store`` protocol: immutable bytes under content-addressed names. A store never sees a tensor.

Two namespaces, as in Bazel's HTTP cache: ``cas`` holds objects named by the SHA-256 of their bytes (bitstreams,
profiles), ``ac`` holds manifests named by a document's content key. An object in ``cas`` never changes; one in
``ac`` may be replaced by a newer manifest of the same document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, Protocol

from cachegen_rag.errors import ConfigError

Namespace = Literal["cas", "ac"]
MAX_OBJECT_BYTES = 1 << 30
"""Upper limit of one object, checked before anything is read or allocated."""

_KEY = re.compile(r"[0-9a-f]{64}\Z")


def check_key(key: str) -> str:
    """Return ``key`` if it is 64 lower-case hex digits; raise ConfigError otherwise."""
    if not isinstance(key, str) or not _KEY.match(key):
        raise ConfigError(f"a store key is 64 lower-case hex digits, got {key!r:.100}")
    return key


class Store(Protocol):
    """Where bitstreams and manifests are kept. Thread-safe; several processes may share one.

    ``deadline`` is a ``time.monotonic()`` value; None waits as long as the store's own limits allow.
    """

    @property
    def url(self) -> str:
        """The URL this store was opened with, without credentials."""

    def get(
        self, namespace: Namespace, key: str, *, max_bytes: int = MAX_OBJECT_BYTES, deadline: float | None = None
    ) -> bytes | None:
        """The object, or None if it is not there. The bytes are not verified: the caller does that.

        Raises StoreUnavailableError, DeadlineExceededError, or CorruptBitstreamError beyond ``max_bytes``.
        """

    def put(self, namespace: Namespace, key: str, data: bytes, *, deadline: float | None = None) -> None:
        """Store the object, whole or not at all. Raises StoreUnavailableError, StoreFullError."""

    def contains(self, namespace: Namespace, key: str) -> bool:
        """Whether the object is there."""

    def delete(self, namespace: Namespace, key: str) -> bool:
        """Remove the object; False if it was not there."""

    def keys(self, namespace: Namespace) -> Iterator[str]:
        """All keys of a namespace, in no order. A remote store may not be able to list: StoreError."""

    def size(self) -> int:
        """Bytes stored."""

    def close(self) -> None:
        """Release files and connections. Idempotent."""
