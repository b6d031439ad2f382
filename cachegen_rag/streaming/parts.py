"""What a transfer is made of: the chunks of a prompt, what became of them, and what the model is told to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cachegen_rag.codec import Codec
from cachegen_rag.manifest import Chunk


@dataclass
class Part:
    """A chunk of the prompt that may come from the store.

    start : prompt position of its first token. level : the level read when there is no time to first token to keep.
    head : tokens of it that are computed in any case. gap : tokens computed between the part before it and this one.
    """

    chunk: Chunk
    token_ids: Sequence[int]
    codec: Codec
    level: int
    start: int
    head: int = 0
    gap: int = 0


@dataclass
class ChunkOutcome:
    """What became of a chunk. Times are milliseconds; ``reason`` says why it was computed, if it was."""

    level: int | None = None
    bytes: int = 0
    fetch_ms: float = 0.0
    decode_ms: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Ready:
    """The chunk is in its target: commit it and take the rows not computed yet."""


@dataclass(frozen=True)
class Compute:
    """Compute the next ``tokens`` of the chunk, then ask again. ``reason`` if the rest will not come from the store."""

    tokens: int
    reason: str | None = None


@dataclass(frozen=True)
class Event:
    """A step for timelines: ``what`` happened to chunk ``part`` from ``start`` to ``stop``, seconds after the start."""

    what: Literal["fetch", "decode", "splice", "compute"]
    part: int
    start: float
    stop: float
    level: int | None = None


def levels_of(part: Part, choose: bool) -> list[int]:
    """Levels that may be read, finest first: all whose quality is known if there is a choice, else the part's own."""
    stored = {entry.level: entry for entry in part.chunk.levels if len(entry.segments) == 1}
    if not choose:
        return [part.level] if part.level in stored else []
    known = [level for level, entry in stored.items() if entry.expected_kl is not None]
    return sorted(known) or ([part.level] if part.level in stored else [])
