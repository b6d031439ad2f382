"""The library: documents of one model in one store. Content keys, manifests, bitstreams; no engine.

A document is written bitstreams first, manifest last, so a reader finds it whole or not at all; an interrupted run is
taken up where it stopped, and two processes that write the same document write the same objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from cachegen_rag.codec import Codec
from cachegen_rag.errors import BitstreamError
from cachegen_rag.fingerprint import document_key
from cachegen_rag.kv import KV
from cachegen_rag.manifest import MAX_MANIFEST_BYTES, Chunk, Level, Manifest, Segment
from cachegen_rag.stores.base import Store

CHUNK_TOKENS = 256
"""Tokens of a chunk: small enough to stream, large enough that what a chunk costs by itself stays below 1 %."""


def chunk_ranges(tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> Iterator[tuple[int, int]]:
    """Ranges of about equal length, none over ``chunk_tokens``, so that no chunk is a costly remnant."""
    count = -(-tokens // chunk_tokens)
    edges = np.linspace(0, tokens, count + 1).round().astype(int).tolist()
    yield from itertools.pairwise(edges)


class Library:
    """Documents of one model, as the codec's profile and fingerprint name it, in ``store``.

    ``salt`` keeps the keys of tenants of one store apart.
    """

    def __init__(self, store: Store, codec: Codec, salt: str = "") -> None:
        self.store, self.codec, self._salt = store, codec, salt

    def key(self, token_ids: Sequence[int]) -> str:
        """The content key of a document: what its manifest is stored under."""
        return document_key(self.codec.fingerprint, token_ids, profile=self.codec.profile.hash, salt=self._salt)

    def manifest(self, key: str, deadline: float | None = None) -> Manifest:
        """The verified manifest under ``key``. Raises LookupError if there is none, BitstreamError, StoreError."""
        data = self.store.get("ac", key, max_bytes=MAX_MANIFEST_BYTES, deadline=deadline)
        if data is None:
            raise LookupError("not in the store")
        return self.read_manifest(key, data)

    def read_manifest(self, key: str, data: bytes) -> Manifest:
        """The manifest in ``data``, verified to be the one of ``key``. Raises BitstreamError."""
        codec = self.codec
        return Manifest.from_bytes(data).expect(key=key, fingerprint=codec.fingerprint, profile=codec.profile.hash)

    def contains(self, key: str, levels: Sequence[int]) -> bool:
        """Whether the document is stored whole at all these levels. Raises StoreError."""
        try:
            manifest = self.manifest(key)
        except (LookupError, BitstreamError):
            return False
        for chunk in manifest.chunks:
            stored = {level.level: level.segments for level in chunk.levels}
            for level in levels:
                if not all(self.store.contains("cas", s.sha256) for s in stored.get(level, ())) or level not in stored:
                    return False
        return True

    def put(self, key: str, kv: KV, levels: Sequence[int], ranges: Iterable[tuple[int, int]]) -> Manifest:
        """Encode ``kv`` in chunks, one a range of its rows, at every level, and store it under ``key``.

        Raises EncodeError, StoreUnavailableError or StoreFullError; a manifest never names an object that is not there.
        """
        chunks = []
        for start, stop in ranges:
            entries = []
            for level in sorted(set(levels)):
                data = self.codec.encode(kv[start:stop], level)
                segment = Segment.of(data)
                self.store.put("cas", segment.sha256, data)
                entries.append(Level(level, self.codec.expected_kl(level), (segment,)))
            chunks.append(Chunk(start, stop, tuple(entries)))
        manifest = Manifest(key, self.codec.fingerprint, self.codec.profile.hash, len(kv), tuple(chunks))
        self.store.put("ac", key, manifest.to_bytes())
        return manifest
