"""What KVCache hands out: the tokens of an answer as they come, and counts."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from cachegen_rag.metrics import RequestRecord
from cachegen_rag.models.base import Token


@dataclass
class CacheStats:
    """Counts since the cache was opened, and what the store holds now (None where a store cannot tell).

    ``shadow_...`` are of requests that were computed in full too: how many, and per token of their answers the mean KL
    in nats and the share whose most likely token was the same; None while none was.
    """

    requests: int = 0
    hits: int = 0
    misses: int = 0
    miss_reasons: dict[str, int] = field(default_factory=dict)
    spliced_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    bytes_fetched: int = 0
    shadow_checks: int = 0
    shadow_kl: float | None = None
    shadow_top1: float | None = None
    store_bytes: int | None = None
    store_documents: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return dataclasses.asdict(self)


class Totals:
    """Adds up the records of requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collected stream may be counted at any allocation, under the lock too
        self._stats = CacheStats()
        self._reasons: Counter[str] = Counter()

    def count(self, record: RequestRecord) -> None:
        """Count a finished request."""
        documents = [segment for segment in record.segments if segment.kind == "document"]
        with self._lock:
            stats = self._stats
            stats.requests += 1
            stats.prompt_tokens += record.prompt_tokens
            stats.spliced_tokens += record.spliced_tokens
            stats.recomputed_tokens += record.recomputed_tokens
            stats.bytes_fetched += record.bytes_fetched
            for segment in documents:
                if segment.source == "text":
                    stats.misses += 1
                    self._reasons[segment.reason or "unknown"] += 1
                else:
                    stats.hits += 1

    def stats(self) -> CacheStats:
        """A copy of what was counted so far."""
        with self._lock:
            return dataclasses.replace(self._stats, miss_reasons=dict(self._reasons))


class Stream:
    """The tokens of one answer as they are generated. Iterate it; ``record`` is complete when it ends.

    ``close()`` cancels: the model is free again after the decode step under way.
    """

    def __init__(self, record: RequestRecord, tokens: Iterator[Token]) -> None:
        self.record = record
        self._tokens = tokens

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """Stop generating and free the model. Idempotent."""
        close = getattr(self._tokens, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def text(self) -> str:
        """Generate to the end and return the answer."""
        return "".join(token.text for token in self)
