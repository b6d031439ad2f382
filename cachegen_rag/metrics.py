"""What happened in a request: per segment, with reasons. Plain data, JSON-ready."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["text", "store", "memory", "exact"]
"""Where a segment's KV came from: computed, spliced from the store, kept in the engine, or exact prefix reuse."""


@dataclass
class SegmentRecord:
    """One piece of the prompt. Times are milliseconds; ``reason`` says why a document was not spliced."""

    kind: str
    tokens: int
    source: Source = "text"
    doc_id: str | None = None
    level: int | None = None
    recomputed: int = 0
    bytes: int = 0
    fetch_ms: float = 0.0
    decode_ms: float = 0.0
    splice_ms: float = 0.0
    recompute_ms: float = 0.0
    reason: str | None = None


@dataclass
class RequestRecord:
    """One request: what every segment cost and where it came from.

    ``started_at`` is Unix time, seconds; ``wait_ms`` the time until the engine was free, part of ``ttft_ms``;
    ``stored_tokens`` are of documents that were missed and are stored when idle, after the answer.
    """

    model: str = ""
    started_at: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spliced_tokens: int = 0
    recomputed_tokens: int = 0
    stored_tokens: int = 0
    bytes_fetched: int = 0
    wait_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    finish_reason: str | None = None
    segments: list[SegmentRecord] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return dataclasses.asdict(self)
