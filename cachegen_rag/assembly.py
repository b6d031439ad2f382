"""A prompt is assembled on a session: stored documents are looked up, loaded and taken, everything else is decoded.

Whatever cannot be taken is decoded in its place, so the prompt is complete and right in every case; the record says
for each segment where it came from, and why not from the store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from cachegen_rag.errors import BitstreamError, CacheGenError
from cachegen_rag.exact import ExactRuns
from cachegen_rag.library import Library
from cachegen_rag.manifest import Manifest
from cachegen_rag.metrics import RequestRecord, SegmentRecord
from cachegen_rag.models.base import Session
from cachegen_rag.prompt import Prompt
from cachegen_rag.recompute import Recompute, Scene, look, recompute_runs
from cachegen_rag.splice import Decode, Plan, Range, Take, between, is_gap, leading_text, plan
from cachegen_rag.streaming.parts import Part, Ready
from cachegen_rag.streaming.pipeline import Loader
from cachegen_rag.streaming.transfer import Transfer

TAKEN, DECODED = 1, 2


@dataclass
class Source:
    """What prompts are assembled from: the stored documents, the loader, the level that is read.

    recompute : which rows of the documents are computed anew, and how many. layers : of the model, for methods that
    look at the question. slo : seconds to the first token that requests should keep; it lets the level be chosen for
    each chunk. closed : why documents are not spliced (the model's gate), if they are not; exact runs still are reused.
    """

    library: Library
    loader: Loader
    level: int
    recompute: Recompute
    layers: int
    exact: ExactRuns | None = None
    slo: float | None = None
    closed: str | None = None


class Assembler:
    """Assembles one prompt. ``source`` is None if nothing may be spliced, for the ``refusal`` given."""

    def __init__(
        self, source: Source | None, prompt: Prompt, record: RequestRecord, refusal: str | None = None
    ) -> None:
        self._source, self._prompt, self._record = source, prompt, record
        self.missing: list[int] = []  # documents that the store says it does not have
        self._manifests: dict[int, Manifest] = {}
        self._run: tuple[int, Manifest] | None = None
        self._steps = Plan(())
        self._transfer: Transfer | None = None
        self._owners: list[int] = []  # the segment whose record counts a part, for each part of the transfer
        self._refused: dict[int, str | None] = {}  # parts handed to the engine, and why it would not have them
        self._due = time.monotonic() + source.slo if source is not None and source.slo is not None else None
        self._pending: list[int] | None = None  # start and stop of what is to be decoded next
        self._gaps: list[Range] = []  # positions that were skipped or taken, and are computed when all is in place
        self._origin = np.zeros(len(prompt), dtype=np.int8)  # of every position: TAKEN or DECODED
        for segment in prompt.segments:
            part = SegmentRecord(segment.kind, len(segment), doc_id=segment.doc_id)
            if segment.kind == "document":
                part.reason = "the document is empty" if not len(segment) else refusal
            record.segments.append(part)

    def look_up(self) -> None:
        """Find out what is stored and begin to fetch it, before the model is taken: needs no engine."""
        source = self._source
        if source is not None:
            began = time.perf_counter()
            self._run = source.exact.find(self._prompt) if source.exact is not None else None
            if self._record.segments:
                self._record.segments[0].fetch_ms += (time.perf_counter() - began) * 1e3
            self._find_documents(source)
        self._steps = self._plan()
        if source is not None:
            self._open(source)

    def _find_documents(self, source: Source) -> None:
        prompt, library = self._prompt, source.library
        wanted = [i for i in prompt.documents if i >= self._exact and len(prompt.segments[i])]
        if source.closed is not None:
            for index in wanted:
                self._record.segments[index].reason = source.closed
            return
        keys = [library.key(prompt.segments[i].token_ids) for i in wanted]
        began = time.perf_counter()
        found = source.loader.look_up(keys, tokens=len(prompt), due=self._due)
        for index, key, data in zip(wanted, keys, found, strict=True):
            part = self._record.segments[index]
            try:
                if isinstance(data, Exception):
                    raise data
                manifest = library.read_manifest(key, data)
                if manifest.tokens != len(prompt.segments[index]):
                    raise BitstreamError(f"the manifest is of {manifest.tokens} tokens")
                self._manifests[index] = manifest
            except LookupError as error:
                part.reason = str(error)
                self.missing.append(index)
            except Exception as error:  # whatever it is, the text still answers
                part.reason = f"{type(error).__name__}: {error}"
            part.fetch_ms += (time.perf_counter() - began) * 1e3 / len(wanted)

    @property
    def _exact(self) -> int:
        """Leading segments that are reused exactly."""
        return self._run[0] if self._run is not None else 0

    def build(self, session: Session) -> None:
        """Put the whole prompt on ``session``; its last token is decoded, so that generation can begin."""
        try:
            if self._transfer is not None:
                for i, part in enumerate(self._transfer.parts):
                    positions = np.arange(part.start, part.start + len(part.token_ids), dtype=np.int32)
                    self._transfer.attach(i, session.stage(positions))
            at = self._reuse(session)
            looking = self._looks_at()
            self._run_steps(session, at, looking)
            if looking < len(self._prompt):
                self._look(session)
                self._run_steps(session, looking, len(self._prompt))
        finally:
            self.close()
        self._tally()
        self._keep(session)

    def _run_steps(self, session: Session, start: int, stop: int) -> None:
        """Bring the prompt from position ``start`` to ``stop`` as planned."""
        for step in between(self._steps.steps, start, stop):
            if isinstance(step, Take):
                self._take_loaded(session, step)
            elif is_gap(step, self._prompt):
                self._skip(session, step.start, step.stop)
            else:
                self._decode_later(session, step.start, step.stop)
        self._flush(session)

    def _looks_at(self) -> int:
        """Where the question begins that the recompute method looks at first; the prompt's length if it does not."""
        source, prompt = self._source, self._prompt
        looks = source is not None and source.recompute.method.looks and len(self._steps.spliced) > 0
        if not looks or prompt.segments[-1].kind != "text" or not self._budget(self._steps):
            return len(prompt)
        return prompt.offsets[-2]

    def _look(self, session: Session) -> None:
        """Score tokens by the question's attention, and plan anew: what is recomputed becomes a gap."""
        assert self._source is not None
        prompt = self._prompt
        spliced = [i for i in self._steps.spliced if (self._origin[slice(*prompt.offsets[i : i + 2])] == TAKEN).any()]
        if not spliced:
            return
        if self._gaps and self._gaps[-1][1] == session.length:  # the question must see the row right before it
            self._fill_gaps(session)
        began = time.perf_counter()
        scores = look(session, prompt, self._source.layers)
        scene = Scene(prompt, tuple(spliced), self._budget(self._steps), scores)
        again = self._source.recompute.method.choose(scene)
        self._steps = plan(prompt, self._manifests.keys(), again, exact=self._exact)
        wanted = np.zeros(len(prompt) + 1, dtype=np.int8)
        for step in between(self._steps.steps, leading_text(prompt), prompt.offsets[-2]):
            if isinstance(step, Decode):
                wanted[step.start : step.stop] = self._origin[step.start : step.stop] != DECODED
        edges = np.flatnonzero(np.diff(wanted, prepend=0)).tolist()
        self._gaps = list(zip(edges[::2], edges[1::2], strict=True))
        self._record.segments[-1].recompute_ms += (time.perf_counter() - began) * 1e3

    def _budget(self, steps: Plan) -> int:
        """Document tokens that may be recomputed."""
        assert self._source is not None
        text, probe = self._source.loader.text, 64
        seconds = text.seconds(probe, len(self._prompt) // 2)
        rate = probe / seconds if seconds > 0 else None
        return self._source.recompute.tokens(self._prompt, steps, target_s=self._source.slo, tokens_per_s=rate)

    def _tally(self) -> None:
        """Count what was taken and what was computed."""
        record, taken = self._record, self._origin == TAKEN
        record.spliced_tokens = int(taken.sum())
        record.recomputed_tokens = 0
        for index, part in enumerate(record.segments):
            rows = taken[self._prompt.offsets[index] : self._prompt.offsets[index + 1]]
            if part.kind == "document":
                part.recomputed = int(len(rows) - rows.sum())
                if part.source != "text":
                    record.recomputed_tokens += part.recomputed

    def close(self) -> None:
        """End what is still being loaded. Idempotent."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        transfer.close()
        for owner, outcome in zip(self._owners, transfer.outcomes, strict=True):
            part = self._record.segments[owner]
            part.bytes += outcome.bytes
            part.fetch_ms += outcome.fetch_ms
            part.decode_ms += outcome.decode_ms
            part.reason = part.reason or outcome.reason
            self._record.bytes_fetched += outcome.bytes

    def _plan(self) -> Plan:
        if self._source is None:
            return plan(self._prompt)
        steps = plan(self._prompt, self._manifests.keys(), exact=self._exact)
        method = self._source.recompute.method
        if method.looks or not steps.spliced:
            return steps
        again = method.choose(Scene(self._prompt, steps.spliced, self._budget(steps)))
        return plan(self._prompt, self._manifests.keys(), again, exact=self._exact) if again else steps

    def _open(self, source: Source) -> None:
        """Begin to load every chunk that the plan takes rows of."""
        prompt, parts = self._prompt, list[Part]()
        takes = [step for step in self._steps.steps if isinstance(step, Take)]
        runs = [(i, self._manifests[i], source.library, source.level) for i in self._steps.spliced]
        if self._run is not None and source.exact is not None:
            runs.insert(0, (0, self._run[1], source.exact.library, source.exact.level))
        late = np.zeros(len(prompt), dtype=np.int64)  # positions that are computed when all is in place
        for step in self._steps.steps:
            late[step.start : step.stop] = is_gap(step, prompt)
        at = 0
        for index, manifest, library, level in runs:
            offset = prompt.offsets[index]
            for chunk in manifest.chunks:
                start, stop = offset + chunk.start, offset + chunk.stop
                taken = sum(max(0, min(take.stop, stop) - max(take.start, start)) for take in takes)
                if taken:
                    ids = prompt.token_ids[start:stop]
                    head = stop - start - taken - int(late[start:stop].sum())
                    gap = start - at - int(late[at:start].sum())
                    parts.append(Part(chunk, ids, library.codec, level, start, head, gap))
                    self._owners.append(index)
                    at = stop
        if parts:
            parts[0].gap, prefix = 0, parts[0].start
            tail = len(prompt) - at + int(late[:at].sum())
            self._transfer = source.loader.open(parts, due=self._due, prefix=prefix, tail=tail)

    def _take_loaded(self, session: Session, step: Take) -> None:
        """Take the rows of one step, chunk by chunk as they arrive; what is not there in time is computed instead."""
        assert self._transfer is not None
        for i, part in enumerate(self._transfer.parts):
            at = max(step.start, part.start)
            stop = min(step.stop, part.start + len(part.token_ids))
            while at < stop:
                at = self._advance(session, self._transfer, i, at, stop, step.segment is None)

    def _advance(self, session: Session, transfer: Transfer, i: int, at: int, stop: int, exact: bool) -> int:
        """Bring the prompt forward from ``at`` towards ``stop`` within part ``i``; where it then is."""
        part = transfer.parts[i]
        reason = self._refused.get(i)
        if reason is None:
            advice = transfer.next(i, at - part.start)
            if isinstance(advice, Ready):
                self._flush(session)
                reason = self._splice(session, transfer, i, at, stop)
                if reason is None:
                    self._note(at, stop, transfer.outcomes[i].level, exact, None)
                    return stop
            elif advice.reason is None:  # a slice, while the chunk is on its way
                stop = min(stop, at + advice.tokens)
                self._decode_later(session, at, stop)
                began = time.monotonic()
                self._flush(session)
                transfer.computed(i, began, time.monotonic())
                return stop
            else:
                reason = advice.reason
        self._note(at, stop, None, exact, reason)
        self._decode_later(session, at, stop)
        return stop

    def _splice(self, session: Session, transfer: Transfer, i: int, start: int, stop: int) -> str | None:
        """Hand part ``i`` to the engine, once, and take its rows; the reason if the engine would not."""
        began = time.monotonic()
        segment = self._record.segments[self._owners[i]]
        try:
            if i not in self._refused:
                self._refused[i] = None
                session.commit(transfer.target(i))
            session.take(start, stop, self._prompt.token_ids[start:stop])
        except CacheGenError as error:
            session.truncate(start)
            self._refused[i] = f"{type(error).__name__}: {error}"
        stopped = time.monotonic()
        segment.splice_ms += (stopped - began) * 1e3
        transfer.spliced(i, began, stopped)
        return self._refused[i]

    def _note(self, start: int, stop: int, level: int | None, exact: bool, reason: str | None) -> None:
        """Write into the record of every segment in a run of positions what became of it."""
        if reason is None:
            self._origin[start:stop] = TAKEN
        for index, part in enumerate(self._record.segments):
            a, b = max(start, self._prompt.offsets[index]), min(stop, self._prompt.offsets[index + 1])
            if a >= b:
                continue
            if reason is None:
                part.source, part.level = "exact" if exact else "store", level
            elif part.kind == "document":
                at = self._prompt.offsets[index]
                part.reason = part.reason or f"tokens {a - at}-{b - at}: {reason}"

    def _skip(self, session: Session, start: int, stop: int) -> None:
        """Leave out a short run between documents, to be computed in one call with the others."""
        if self._pending is not None and self._pending[1] == start:  # behind text that is decoded anyway: with it
            self._decode_later(session, start, stop)
            return
        self._flush(session)
        session.skip(self._prompt.token_ids[start:stop])
        self._gaps.append((start, stop))

    def _decode_later(self, session: Session, start: int, stop: int) -> None:
        """Join decodes that meet: one engine call for a question behind a chunk that did not load."""
        if self._pending is not None and self._pending[1] == start:
            self._pending[1] = stop
            return
        self._flush(session)
        if self._gaps and self._gaps[-1][1] == start == session.length:
            start, _ = self._gaps.pop()
            session.truncate(start)
        self._pending = [start, stop]

    def _flush(self, session: Session) -> None:
        """Decode what waits for it: the gaps before it first, which it must see."""
        if self._pending is None:
            return
        start, stop = self._pending
        self._pending = None
        self._fill_gaps(session)
        began = time.perf_counter()
        session.decode(self._prompt.token_ids[start:stop])
        self._decoded([(start, stop)], time.perf_counter() - began)

    def _fill_gaps(self, session: Session) -> None:
        gaps, self._gaps = self._gaps, []
        if gaps:
            began = time.perf_counter()
            recompute_runs(session, gaps)
            self._decoded(gaps, time.perf_counter() - began)

    def _decoded(self, runs: list[Range], seconds: float) -> None:
        """Count what one or a few calls have computed."""
        total = sum(stop - start for start, stop in runs)
        if self._source is not None:
            self._source.loader.text.record(total, runs[0][0], seconds)
        for start, stop in runs:
            self._origin[start:stop] = DECODED
            for index, part in enumerate(self._record.segments):
                a, b = self._prompt.offsets[index], self._prompt.offsets[index + 1]
                shared = max(0, min(b, stop) - max(a, start))
                part.recompute_ms += seconds * 1e3 * shared / total

    def _reuse(self, session: Session) -> int:
        """Leading text that the engine still holds from an earlier prompt, computed then: exact, and free."""
        first = leading_text(self._prompt)
        at = session.reuse(self._prompt.token_ids[:first]) if first else 0
        if at and self._record.segments:
            self._record.segments[0].source = "memory"
        return at

    def _keep(self, session: Session) -> None:
        if leading_text(self._prompt):
            session.keep(leading_text(self._prompt))
