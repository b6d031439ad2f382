"""A prompt is assembled on a session: stored documents are looked up, loaded and taken, everything else is decoded.

Whatever cannot be taken is decoded in its place, so the prompt is complete and right in every case; the record says
for each segment where it came from, and why not from the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachegen_rag.codec import Codec
from cachegen_rag.errors import BitstreamError, CacheGenError, StoreError
from cachegen_rag.exact import ExactRuns
from cachegen_rag.library import Library
from cachegen_rag.loading import ChunkOutcome, Load, Loader
from cachegen_rag.manifest import Chunk, Manifest
from cachegen_rag.metrics import RequestRecord, SegmentRecord
from cachegen_rag.models.base import Session
from cachegen_rag.prompt import Prompt
from cachegen_rag.splice import Decode, Plan, Range, Take, plan

Recompute = Callable[[Prompt], Mapping[int, list[Range]]]
"""Which rows of each document are computed anew, chosen when a prompt is planned."""


def heads(tokens: int) -> Recompute:
    """Compute the first ``tokens`` of every document anew (EPIC, 2024: they hold the false attention sink)."""

    def choose(prompt: Prompt) -> Mapping[int, list[Range]]:
        return {i: [(0, tokens)] for i in prompt.documents} if tokens else {}

    return choose


@dataclass
class Source:
    """What prompts are assembled from: the stored documents, the loader, the level that is read."""

    library: Library
    loader: Loader
    level: int
    recompute: Recompute
    exact: ExactRuns | None = None


class Assembler:
    """Assembles one prompt. ``source`` is None if nothing may be spliced, for the ``refusal`` given."""

    def __init__(
        self, source: Source | None, prompt: Prompt, record: RequestRecord, refusal: str | None = None
    ) -> None:
        self._source, self._prompt, self._record = source, prompt, record
        self._manifests: dict[int, Manifest] = {}
        self._run: tuple[int, Manifest] | None = None
        self._loads: dict[int | None, Load] = {}  # by document segment; None: the exact run
        self._pending: list[int] | None = None  # start and stop of what is to be decoded next
        for segment in prompt.segments:
            part = SegmentRecord(segment.kind, len(segment), doc_id=segment.doc_id)
            if segment.kind == "document":
                part.reason = "the document is empty" if not len(segment) else refusal
            record.segments.append(part)

    def look_up(self) -> None:
        """Find out what is stored, before the model is taken: needs no engine."""
        if self._source is None:
            return
        library = self._source.library
        began = time.perf_counter()
        self._run = self._source.exact.find(self._prompt) if self._source.exact is not None else None
        if self._record.segments:
            self._record.segments[0].fetch_ms += (time.perf_counter() - began) * 1e3
        for index in self._prompt.documents:
            if index < self._exact:
                continue
            segment, part = self._prompt.segments[index], self._record.segments[index]
            if not len(segment):
                continue
            began = time.perf_counter()
            try:
                manifest = library.manifest(library.key(segment.token_ids))
                if manifest.tokens != len(segment):
                    raise BitstreamError(f"the manifest is of {manifest.tokens} tokens")
                self._manifests[index] = manifest
            except LookupError as error:
                part.reason = str(error)
            except (BitstreamError, StoreError) as error:
                part.reason = f"{type(error).__name__}: {error}"
            part.fetch_ms += (time.perf_counter() - began) * 1e3

    @property
    def _exact(self) -> int:
        """Leading segments that are reused exactly."""
        return self._run[0] if self._run is not None else 0

    def build(self, session: Session) -> None:
        """Put the whole prompt on ``session``; its last token is decoded, so that generation can begin."""
        steps = self._plan()
        try:
            self._start(session, steps)
            at = self._reuse(session)
            for step in steps.steps:
                if step.stop <= at:
                    continue
                if isinstance(step, Decode):
                    self._decode_later(session, max(step.start, at), step.stop)
                else:
                    self._take_loaded(session, Take(max(step.start, at), step.stop, step.segment))
            self._flush(session)
        finally:
            if self._source is not None:
                self._source.loader.cancel(list(self._loads.values()))
        self._keep(session)

    def _plan(self) -> Plan:
        if self._source is None:
            return plan(self._prompt)
        return plan(self._prompt, self._manifests.keys(), self._source.recompute(self._prompt), exact=self._exact)

    def _start(self, session: Session, steps: Plan) -> None:
        """Hand out the engine's memory for every document that is taken, and start loading all of them."""
        if self._source is None:
            return
        if self._run is not None and self._source.exact is not None:
            exact, ids = self._source.exact, self._prompt.token_ids[: self._run[1].tokens]
            self._begin(session, None, self._run[1].chunks, 0, ids, exact.library.codec, exact.level)
        codec, level = self._source.library.codec, self._source.level
        for index in steps.spliced:
            ids = list(self._prompt.segments[index].token_ids)
            self._begin(session, index, self._manifests[index].chunks, self._prompt.offsets[index], ids, codec, level)

    def _begin(
        self,
        session: Session,
        index: int | None,
        chunks: Sequence[Chunk],
        offset: int,
        ids: list[int],
        codec: Codec,
        level: int,
    ) -> None:
        assert self._source is not None
        target = session.stage(np.arange(offset, offset + len(ids), dtype=np.int32))
        self._loads[index] = Load(chunks, ids, target, codec, level)
        self._source.loader.start(self._loads[index])

    def _take_loaded(self, session: Session, step: Take) -> None:
        """Take the rows of one step; those of a chunk that did not load are decoded instead."""
        load = self._loads[step.segment]
        offset = 0 if step.segment is None else self._prompt.offsets[step.segment]
        part = self._record.segments[step.segment or 0]
        outcomes = list(load.outcomes())
        self._commit(session, load, outcomes, part)
        for outcome in outcomes:
            start, stop = max(step.start, offset + outcome.chunk.start), min(step.stop, offset + outcome.chunk.stop)
            if start >= stop:
                continue
            reason = outcome.reason or load.refused
            if reason is None:
                self._flush(session)
                reason = self._take(session, start, stop, part)
            self._note(start, stop, outcome.level if reason is None else None, step.segment is None, reason)
            if reason is not None:
                self._decode_later(session, start, stop)

    def _commit(self, session: Session, load: Load, outcomes: list[ChunkOutcome], part: SegmentRecord) -> None:
        """Hand what was loaded to the engine, once."""
        if load.committed:
            return
        load.committed = True
        for outcome in outcomes:
            part.bytes += outcome.bytes
            part.fetch_ms += outcome.fetch_ms
            part.decode_ms += outcome.decode_ms
            self._record.bytes_fetched += outcome.bytes
        if any(outcome.reason is None for outcome in outcomes):
            began = time.perf_counter()
            try:
                session.commit(load.target)
            except CacheGenError as error:
                load.refused = f"{type(error).__name__}: {error}"
            part.splice_ms += (time.perf_counter() - began) * 1e3

    def _note(self, start: int, stop: int, level: int | None, exact: bool, reason: str | None) -> None:
        """Write into the record of every segment in a run of positions what became of it."""
        if reason is None:
            self._record.spliced_tokens += stop - start
        for index, part in enumerate(self._record.segments):
            a, b = max(start, self._prompt.offsets[index]), min(stop, self._prompt.offsets[index + 1])
            if a >= b:
                continue
            if reason is None:
                part.source, part.level = "exact" if exact else "store", level
            elif part.kind == "document":
                at = self._prompt.offsets[index]
                part.reason = part.reason or f"tokens {a - at}-{b - at}: {reason}"

    def _take(self, session: Session, start: int, stop: int, part: SegmentRecord) -> str | None:
        """Take rows from the library; the reason if the engine would not."""
        began = time.perf_counter()
        try:
            session.take(start, stop, self._prompt.token_ids[start:stop])
        except CacheGenError as error:
            session.truncate(start)
            return f"{type(error).__name__}: {error}"
        finally:
            part.splice_ms += (time.perf_counter() - began) * 1e3
        return None

    def _decode_later(self, session: Session, start: int, stop: int) -> None:
        """Join decodes that meet: one engine call for a question behind a chunk that did not load."""
        if self._pending is not None and self._pending[1] == start:
            self._pending[1] = stop
            return
        self._flush(session)
        self._pending = [start, stop]

    def _flush(self, session: Session) -> None:
        if self._pending is None:
            return
        start, stop = self._pending
        self._pending = None
        began = time.perf_counter()
        session.decode(self._prompt.token_ids[start:stop])
        spent = (time.perf_counter() - began) * 1e3
        for index, part in enumerate(self._record.segments):
            a, b = self._prompt.offsets[index], self._prompt.offsets[index + 1]
            shared = min(b, stop) - max(a, start)
            if shared > 0:
                part.recompute_ms += spent * shared / (stop - start)
                if part.kind == "document":
                    part.recomputed += shared
        self._record.recomputed_tokens = sum(p.recomputed for p in self._record.segments if p.source != "text")

    def _reuse(self, session: Session) -> int:
        """Leading text that the engine still holds from an earlier prompt, computed then: exact, and free."""
        reuse = getattr(session, "reuse", None)
        if reuse is None:
            return 0
        first = self._leading_text()
        at = int(reuse(self._prompt.token_ids[:first])) if first else 0
        if at and self._record.segments:
            self._record.segments[0].source = "memory"
        return at

    def _keep(self, session: Session) -> None:
        keep = getattr(session, "keep", None)
        if keep is not None and self._leading_text():
            keep(self._leading_text())

    def _leading_text(self) -> int:
        """Tokens before the first document; none if there is no document, since then the question is among them."""
        documents = self._prompt.documents
        return self._prompt.offsets[documents[0]] if documents else 0
