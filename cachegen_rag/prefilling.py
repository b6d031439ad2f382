"""Documents into a library: what is missing is computed behind the warm contexts, encoded and stored, in batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachegen_rag.errors import EncodeError
from cachegen_rag.library import Library, chunk_ranges
from cachegen_rag.models.base import KVModel
from cachegen_rag.prompt import Document, document_tokens
from cachegen_rag.warm import WarmContext

BATCH_BYTES = 64 << 20
"""Float32 KV of the documents that are computed together: some seconds of work, after which it is stored and told."""

Progress = Callable[[int, int, int, float], None]
"""Called with documents done, documents in all, tokens computed so far, and seconds since the start."""


@dataclass
class PrefillReport:
    """What ``prefill`` did. ``skipped`` holds ``(doc_id or start of the text, reason)``; ``bytes`` were stored anew."""

    documents: int = 0
    computed: int = 0
    present: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, document: Document, reason: str) -> None:
        """Note that a document was not stored."""
        self.skipped.append((document.doc_id or document.text[:40], reason))

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return dataclasses.asdict(self)


class Prefill:
    """One call of ``KVCache.prefill``. ``cancelled`` is asked between steps: True raises RequestCancelledError."""

    def __init__(
        self,
        model: KVModel,
        library: Library | None,
        items: Sequence[Document],
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.report = PrefillReport(documents=len(items))
        self._model, self._library, self._items, self._progress = model, library, items, progress
        self._cancelled = cancelled
        self._began = time.perf_counter()
        self._tell()

    def _tell(self) -> None:
        report = self.report
        report.seconds = time.perf_counter() - self._began
        if self._progress is not None:
            done = report.computed + report.present + len(report.skipped)
            self._progress(done, report.documents, report.tokens, report.seconds)

    def skip_all(self, reason: str) -> None:
        """Store nothing, for this reason."""
        for item in self._items:
            self.report.skip(item, reason)
        self._tell()

    def run(self, warm: WarmContext, levels: Sequence[int], chunk_tokens: int, max_tokens: int | None) -> None:
        """Compute and store what is missing. Raises StoreError."""
        library, model, report = self._library, self._model, self.report
        assert library is not None
        batch: dict[str, tuple[Document, Sequence[int]]] = {}
        waiting = 0
        for item in self._items:
            ids, _ = document_tokens(model, item.text, max_tokens)
            if reason := self._why_not(ids):
                report.skip(item, reason)
                continue
            key = library.key(ids)
            if key in batch or library.contains(key, levels):
                report.present += 1
                continue
            if batch and (waiting + len(ids)) * model.shape.elements_per_token * 4 > BATCH_BYTES:
                self._compute(library, batch, warm, levels, chunk_tokens)
                batch, waiting = {}, 0
            batch[key] = item, ids
            waiting += len(ids)
        if batch:
            self._compute(library, batch, warm, levels, chunk_tokens)
        self._tell()

    def _why_not(self, ids: Sequence[int]) -> str | None:
        if not ids:
            return "the document is empty"
        if len(ids) > self._model.n_ctx:
            return (
                f"the document has {len(ids)} tokens, the context holds {self._model.n_ctx}: split it, set "
                f"max_document_tokens, or load the model with a larger n_ctx"
            )
        return None

    def _compute(
        self,
        library: Library,
        batch: Mapping[str, tuple[Document, Sequence[int]]],
        warm: WarmContext,
        levels: Sequence[int],
        chunk_tokens: int,
    ) -> None:
        """Compute and store a batch; what another thread or process has stored meanwhile is left out."""
        report = self.report
        with self._model.session() as session:
            session.cancelled = self._cancelled
            missing = {key: entry for key, entry in batch.items() if not library.contains(key, levels)}
            report.present += len(batch) - len(missing)
            computed = warm.compute_many(session, [ids for _, ids in missing.values()])
            for (key, (item, ids)), kv in zip(missing.items(), computed, strict=True):
                try:
                    manifest = library.put(key, kv, levels, chunk_ranges(len(kv), chunk_tokens))
                except EncodeError as error:
                    report.skip(item, str(error))
                    continue
                report.computed += 1
                report.tokens += len(ids)
                report.bytes += sum(segment.length for segment in manifest.segments())
        self._tell()
