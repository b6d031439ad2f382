"""From a manifest to spliceable KV: fetch, verify and decode chunks into the engine's memory, each in its turn.

Whatever goes wrong with a chunk is an outcome with a reason, never an exception: the prompt's builder computes that
chunk from its text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cachegen_rag.codec import Codec
from cachegen_rag.errors import BitstreamError, CodecError, StoreError
from cachegen_rag.manifest import Chunk
from cachegen_rag.models.base import KVTarget
from cachegen_rag.stores.base import Store


@dataclass
class ChunkOutcome:
    """What became of a chunk: in the target (``reason`` is None), or why not. Times are milliseconds."""

    chunk: Chunk
    level: int | None = None
    bytes: int = 0
    fetch_ms: float = 0.0
    decode_ms: float = 0.0
    reason: str | None = None


@dataclass
class Load:
    """One document (or exact run) to load: its chunks, their token ids, and where their rows go."""

    chunks: Sequence[Chunk]
    token_ids: Sequence[int]
    target: KVTarget
    codec: Codec
    level: int
    results: list[Future[ChunkOutcome]] = field(default_factory=list)
    committed: bool = False
    refused: str | None = None

    def outcomes(self) -> Iterator[ChunkOutcome]:
        """Outcomes in order; waits for each."""
        for result in self.results:
            yield result.result()


class Loader:
    """Loads chunks on a few threads; decoding releases the GIL, so it runs beside the model's own work."""

    def __init__(self, store: Store, threads: int = 2) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cachegen-load")

    def start(self, load: Load, deadline: float | None = None) -> None:
        """Queue every chunk of ``load``; documents queued first are loaded first."""
        load.results = [self._pool.submit(self._chunk, load, chunk, deadline) for chunk in load.chunks]

    def cancel(self, loads: Sequence[Load]) -> None:
        """Drop what has not begun and wait for what has: the targets may then be freed."""
        for load in loads:
            for result in load.results:
                result.cancel()
        for load in loads:
            for result in load.results:
                if not result.cancelled():
                    result.exception()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _chunk(self, load: Load, chunk: Chunk, deadline: float | None) -> ChunkOutcome:
        outcome = ChunkOutcome(chunk, load.level)
        try:
            (segment,) = chunk.level(load.level).segments
            began = time.perf_counter()
            data = self._store.get("cas", segment.sha256, max_bytes=segment.length, deadline=deadline)
            if data is None:
                outcome.reason = "object is gone from the store"
                return outcome
            segment.verify(data)
            fetched = time.perf_counter()
            outcome.bytes, outcome.fetch_ms = len(data), (fetched - began) * 1e3
            ids = load.token_ids[chunk.start : chunk.stop]
            load.codec.decode_into(data, load.target.rows(chunk.start, chunk.stop), token_ids=ids)
            outcome.decode_ms = (time.perf_counter() - fetched) * 1e3
        except KeyError:
            outcome.reason = f"level {load.level} is not stored"
        except (BitstreamError, StoreError, CodecError) as error:
            outcome.reason = f"{type(error).__name__}: {error}"
        except Exception as error:  # whatever it is, the text still answers
            outcome.reason = f"unexpected {type(error).__name__}: {error}"
        return outcome
