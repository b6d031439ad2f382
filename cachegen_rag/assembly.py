"""A prompt is assembled on a session: stored documents are looked up, loaded and taken, everything else is decoded.

Whatever cannot be taken is decoded in its place, so the prompt is complete and right in every case; the record says
for each segment where it came from, and why not from the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from cachegen_rag.errors import BitstreamError, CacheGenError, StoreError
from cachegen_rag.library import Library
from cachegen_rag.loading import Load, Loader
from cachegen_rag.manifest import Manifest
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


class Assembler:
    """Assembles one prompt. ``source`` is None if nothing may be spliced, for the ``refusal`` given."""

    def __init__(
        self, source: Source | None, prompt: Prompt, record: RequestRecord, refusal: str | None = None
    ) -> None:
        self._source, self._prompt, self._record = source, prompt, record
        self._manifests: dict[int, Manifest] = {}
        self._loads: dict[int, Load] = {}
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
        for index in self._prompt.documents:
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
                elif step.segment is not None:
                    self._take_document(session, step)
            self._flush(session)
        finally:
            if self._source is not None:
                self._source.loader.cancel(list(self._loads.values()))
        self._keep(session)

    def _plan(self) -> Plan:
        if self._source is None:
            return plan(self._prompt)
        return plan(self._prompt, self._manifests.keys(), self._source.recompute(self._prompt))

    def _start(self, session: Session, steps: Plan) -> None:
        """Hand out the engine's memory for every document that is taken, and start loading all of them."""
        if self._source is None:
            return
        for index in steps.spliced:
            manifest, offset = self._manifests[index], self._prompt.offsets[index]
            target = session.stage(np.arange(offset, offset + manifest.tokens, dtype=np.int32))
            ids = self._prompt.segments[index].token_ids
            load = self._loads[index] = Load(manifest.chunks, ids, target, self._source.level)
            self._source.loader.start(load)

    def _take_document(self, session: Session, step: Take) -> None:
        """Take the rows of one step; those of a chunk that did not load are decoded instead."""
        assert step.segment is not None
        part = self._record.segments[step.segment]
        offset = self._prompt.offsets[step.segment]
        load = self._loads[step.segment]
        outcomes = list(load.outcomes())
        if not load.committed:
            load.committed = True
            for outcome in outcomes:
                part.bytes += outcome.bytes
                part.fetch_ms += outcome.fetch_ms
                part.decode_ms += outcome.decode_ms
                self._record.bytes_fetched += outcome.bytes
                if outcome.reason is not None:
                    part.reason = f"tokens {outcome.chunk.start}-{outcome.chunk.stop}: {outcome.reason}"
            if any(outcome.reason is None for outcome in outcomes):
                began = time.perf_counter()
                try:
                    session.commit(load.target)
                except CacheGenError as error:
                    load.refused = f"{type(error).__name__}: {error}"
                part.splice_ms += (time.perf_counter() - began) * 1e3
        for outcome in outcomes:
            start, stop = max(step.start, offset + outcome.chunk.start), min(step.stop, offset + outcome.chunk.stop)
            if start >= stop:
                continue
            reason = outcome.reason or load.refused
            if reason is None:
                self._flush(session)
                reason = self._take(session, start, stop, part)
            if reason is None:
                part.source, part.level = "store", outcome.level
                self._record.spliced_tokens += stop - start
            else:
                part.reason = part.reason or reason
                self._decode_later(session, start, stop)

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
