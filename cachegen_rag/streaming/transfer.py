"""One request's chunks on their way from the store into the engine: fetch, verify, decode, in step with the model.

The model asks in prompt order for what comes next and is told to take a chunk that is there, or to compute a few tokens
because that is better than waiting: the model works from the front while the link works on what lies ahead of it. Each
time the link is free the planner decides anew what it fetches. A chunk that cannot be had, for whatever reason, is
computed; nothing here raises because of stored bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import numpy as np

from cachegen_rag.codec import Codec
from cachegen_rag.errors import BitstreamError, CodecError, StoreError, StoreUnavailableError
from cachegen_rag.manifest import Segment
from cachegen_rag.models.base import KVTarget
from cachegen_rag.streaming.parts import ChunkOutcome, Compute, Event, Part, Ready, levels_of
from cachegen_rag.streaming.policy import MISSING, Link, Work

if TYPE_CHECKING:
    from cachegen_rag.streaming.pipeline import Loader

Status = Literal["waiting", "fetching", "arrived", "decoding", "ready", "failed"]

IN_FLIGHT = 4
"""Transfers of one request under way at once: enough to hide round trips, few enough to arrive in order."""
PATIENCE = 1.2
"""The model computes a slice instead of waiting if the chunk is expected later than this many slices."""
ASK_AHEAD = 16 << 10
"""Bytes still to come of what was asked for when the next chunk is asked for, at least: the link never runs dry."""
PIECE = 4096
"""Bytes that make a piece: a transfer from which fewer come is as good as silent."""
NOTICEABLE = 0.025
"""Seconds by which the store must be slower than computing before it is not asked."""
SLICE_SECONDS = 0.1
CLOSED = "the cache was closed"
SLOW_MODEL = 1000.0
"""Tokens a second below which slices may be 32 tokens; faster engines want at least 64 to be efficient."""


class Transfer:
    """The parts of one prompt. Made by ``Loader.open``; used by the thread that owns the session.

    due : ``time.monotonic()`` at which the first token should be there, or None.
    prefix, tail : tokens that the model computes before the first part and after the last.
    """

    def __init__(self, loader: Loader, parts: Sequence[Part], *, due: float | None, prefix: int, tail: int) -> None:
        self.parts = list(parts)
        self.outcomes = [ChunkOutcome() for _ in parts]
        self.events: list[Event] = []
        self.began = time.monotonic()
        self._loader, self._due = loader, due
        self._lock = loader.lock
        self._changed = threading.Condition(self._lock)
        count = len(self.parts)
        self._status: list[Status] = ["waiting"] * count
        self._targets: list[KVTarget | None] = [None] * count
        self._data: list[bytes | None] = [None] * count
        self._fetches: dict[int, Future[bytes | None]] = {}
        self._asked: dict[int, float] = {}
        self._left: dict[int, int] = {}  # bytes that have not arrived yet, of what is being fetched
        self._heard: set[int] = set()  # parts whose answer has begun to arrive
        self._progress: dict[int, tuple[float, int]] = {}  # when a piece worth the name last came, bytes left then
        self._jobs: list[Future[None]] = []
        self._at = 0  # the part the model is at
        self._done = 0  # tokens of it that are computed
        self._closed = False
        self._plan_compute = 0
        with self._lock:
            self._costs(prefix, tail)
        slowest = loader.text.seconds(sum(len(p.token_ids) for p in self.parts), 0)
        self.priority = due if due is not None else self.began + slowest

    # ---- what the session's owner calls ----

    def begin(self) -> None:
        """Start fetching. What lies on this machine is read once its target is attached."""
        with self._lock:
            if self._loader.remote:
                for i in self._waiting():
                    level = levels_of(self.parts[i], choose=False)  # none: only other levels than its own are stored
                    if level and self._loader.has_local(self._segments(i, level[0])):
                        self._at_hand(i)
                self._schedule()
            elif reason := self._slower_than_computing():
                for i in self._waiting():
                    self._fail(i, reason)
            else:
                for i in self._waiting():
                    self._at_hand(i)

    def attach(self, i: int, target: KVTarget) -> None:
        """Where part ``i`` goes; needed before it can be decoded."""
        with self._lock:
            self._targets[i] = target
            if self._status[i] == "arrived":
                self._decode_soon(i)

    def target(self, i: int) -> KVTarget:
        """Where part ``i`` was decoded to."""
        target = self._targets[i]
        assert target is not None
        return target

    def next(self, i: int, done: int) -> Ready | Compute:
        """What to do at part ``i``, of which ``done`` tokens are computed already. Waits while waiting pays."""
        with self._lock:
            self._passed(i, done)
            while True:
                now = time.monotonic()
                status = self._status[i]
                left = len(self.parts[i].token_ids) - done
                if status == "ready":
                    self._model_free = now + self._splice[i]
                    return Ready()
                if status == "failed":
                    self._model_free = now + self._loader.text.seconds(left, self.parts[i].start + done)
                    return Compute(left, self.outcomes[i].reason)
                self._model_free = now
                if status in ("waiting", "fetching"):
                    self._schedule()
                    status = self._status[i]
                tokens = min(left, self._slice_tokens())
                seconds = self._loader.text.seconds(tokens, self.parts[i].start + done)
                wait = self._expected(i, now)
                planned = status == "waiting" and self._plan_compute > 0
                if planned or (self._loader.fill and wait > PATIENCE * seconds):
                    self._model_free = now + seconds
                    return Compute(tokens)
                self._changed.wait(min(max(1.5 * wait, 0.005), 1.0) if self._loader.fill else 1.0)

    def bytes_left(self, i: int) -> int:
        """Bytes of part ``i`` that are on their way."""
        return self._left.get(i, 0)

    def spliced(self, i: int, start: float, stop: float) -> None:
        """For the timeline: part ``i`` was committed and taken (``time.monotonic()``)."""
        self._event("splice", i, start, stop, self.outcomes[i].level)
        self._loader.costs.record(f"splice/{self._loader.model}", (stop - start) / len(self.parts[i].token_ids))

    def computed(self, i: int, start: float, stop: float) -> None:
        """For the timeline: tokens of part ``i`` were computed."""
        self._event("compute", i, start, stop)

    def close(self) -> None:
        """End what is under way and wait for it: the targets may then be freed. Idempotent."""
        with self._lock:
            self._closed = True
            for i in range(len(self.parts)):
                self._give_up(i)
                if self._status[i] not in ("ready", "failed"):
                    self.outcomes[i].reason = self.outcomes[i].reason or "the request ended before it was needed"
            jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        for job in jobs:
            if not job.cancelled():
                job.exception()
        self._loader.closed(self)

    def _waiting(self) -> list[int]:
        return [i for i, status in enumerate(self._status) if status == "waiting"]

    def _at_hand(self, i: int) -> None:
        """Part ``i`` lies on this machine: as good as arrived, it is read when it is decoded."""
        self._status[i], self.outcomes[i].level = "arrived", self.parts[i].level

    # ---- fetching (the lock is held) ----

    def _schedule(self) -> None:
        """Begin transfers until the link has enough to do."""
        loader, first = self._loader, self._at
        while not self._closed and len(self._fetches) < IN_FLIGHT and "waiting" in self._status[first:]:
            now = time.monotonic()
            rate, trip = loader.rate(now), loader.meter.round_trip.seconds()
            ahead = loader.bytes_in_flight(self.priority)
            if self._fetches and ahead > max(rate * (trip + 0.002), ASK_AHEAD):
                return
            link = Link(rate, trip if not self._fetches else 0.0, loader.meter.estimator.error())
            target = None if self._due is None else self._due - now
            work = self._work(now, ahead / rate)
            decision = loader.planner.decide(work, link, target, now - self.began)
            self._plan_compute = decision.compute
            if decision.fetch is None or decision.level is None:
                return
            self._fetch(first + decision.fetch, self._levels[first + decision.fetch][decision.level])

    def _fetch(self, i: int, level: int) -> None:
        segment = self._segments(i, level)
        outcome = self.outcomes[i]
        outcome.level, self._status[i] = level, "fetching"
        self._left[i], self._asked[i] = segment.length, time.monotonic()
        self._progress[i] = self._asked[i], segment.length
        idle = not self._loader.busy()

        def arrived(size: int) -> None:
            with self._lock:
                if i not in self._fetches:
                    return
                now = time.monotonic()
                if size == 0:
                    if i not in self._heard:  # not again when a broken transfer is taken up
                        self._heard.add(i)
                        self._loader.meter.began(now, now - self._asked[i] if idle else None)
                    return
                self._left[i] = max(0, self._left[i] - size)
                if self._progress[i][1] - self._left[i] >= PIECE:
                    self._progress[i] = now, self._left[i]
                self._loader.meter.arrived(now, size)
                self._schedule()

        try:
            future = self._loader.fetch(segment, self.priority, arrived)
        except StoreError as error:
            self._fail(i, f"{type(error).__name__}: {error}")
            return
        self._fetches[i] = future
        self._loader.flying[id(self), i] = self
        future.add_done_callback(lambda f: self._fetched(i, f))

    def _fetched(self, i: int, future: Future[bytes | None]) -> None:
        with self._lock:
            if self._fetches.get(i) is not future:
                return
            self._landed(i)
            now = time.monotonic()
            self.outcomes[i].fetch_ms = (now - self._asked[i]) * 1e3
            self._event("fetch", i, self._asked[i], now, self.outcomes[i].level)
            error = StoreUnavailableError("the store was closed") if future.cancelled() else future.exception()
            if error is not None:
                self._fail(i, f"{type(error).__name__}: {error}")
            elif (data := future.result()) is None:
                self._fail(i, "the object is gone from the store")
            else:
                self.outcomes[i].bytes = len(data)
                self._data[i], self._status[i] = data, "arrived"
                if self._targets[i] is not None:
                    self._decode_soon(i)
            self._schedule()
            self._changed.notify_all()

    def _landed(self, i: int) -> None:
        self._fetches.pop(i, None)
        self._left.pop(i, None)
        self._loader.flying.pop((id(self), i), None)
        if i in self._heard:
            self._heard.discard(i)
            self._loader.meter.ended(time.monotonic())

    def _give_up(self, i: int) -> None:
        """Stop fetching part ``i``: it is not needed any more."""
        future = self._fetches.get(i)
        if future is not None:
            self._event("fetch", i, self._asked[i], time.monotonic(), self.outcomes[i].level)
            self._landed(i)
            future.cancel()

    def _fail(self, i: int, reason: str) -> None:
        self._status[i] = "failed"
        self.outcomes[i].reason = reason
        self._changed.notify_all()

    def _passed(self, i: int, done: int) -> None:
        """The model has got to token ``done`` of part ``i``."""
        for j in range(self._at, i):
            if self._status[j] not in ("ready", "failed"):
                self._give_up(j)
                self._fail(j, "computing it was faster than the store")
        if (i, done) != (self._at, self._done):
            self._at, self._done = i, done

    # ---- decoding ----

    def _decode_soon(self, i: int) -> None:
        if self._loader.stopped:
            self._fail(i, CLOSED)
            return
        self._status[i] = "decoding"
        job = self._loader.pool.submit(self._decode, i)
        self._jobs.append(job)
        job.add_done_callback(lambda f: self._never_began(i) if f.cancelled() else None)

    def _never_began(self, i: int) -> None:
        """Decoding part ``i`` was cancelled: by the loader's end, or by this transfer's, which has its own reason."""
        with self._lock:
            if not self._closed:
                self._fail(i, CLOSED)

    def _decode(self, i: int) -> None:
        part, outcome, target = self.parts[i], self.outcomes[i], self._targets[i]
        began, reason = time.monotonic(), None
        try:
            assert target is not None and outcome.level is not None
            segment = self._segments(i, outcome.level)
            data, self._data[i] = self._data[i], None
            if data is None:
                data = self._loader.store.get("cas", segment.sha256, max_bytes=segment.length)
                read = time.monotonic()
                outcome.fetch_ms = (read - began) * 1e3
                self._event("fetch", i, began, read, outcome.level)
                began = read
                if data is None:
                    raise LookupError("the object is gone from the store")
                outcome.bytes = len(data)
            segment.verify(data)
            part.codec.decode_into(data, target, token_ids=part.token_ids)
            stop = time.monotonic()
            outcome.decode_ms = (stop - began) * 1e3
            self._event("decode", i, began, stop, outcome.level)
            self._loader.costs.record(_decode_key(part.codec, outcome.level), (stop - began) / len(part.token_ids))
        except LookupError as error:
            reason = str(error)
        except (BitstreamError, StoreError, CodecError) as error:
            reason = f"{type(error).__name__}: {error}"
        except Exception as error:  # whatever it is, the text still answers
            reason = f"unexpected {type(error).__name__}: {error}"
        with self._lock:
            if reason is not None:
                self._fail(i, reason)
            elif self._status[i] == "decoding":
                self._status[i] = "ready"
            self._changed.notify_all()

    # ---- estimates (the lock is held) ----

    def _costs(self, prefix: int, tail: int) -> None:
        """Lay out what the planner needs to know of every part, once."""
        loader, parts = self._loader, self.parts
        choose = self._due is not None and loader.remote
        self._levels = [levels_of(part, choose) for part in parts]
        rows = max([1, *map(len, self._levels)])
        self._sizes = np.full((rows, len(parts)), MISSING)
        self._losses, self._decodes = np.zeros((2, rows, len(parts)))
        self._text, self._splice = np.zeros((2, len(parts)))
        text = loader.text.seconds
        for i, part in enumerate(parts):
            tokens = len(part.token_ids)
            if not self._levels[i]:
                self._fail(i, f"level {part.level} is not stored")
            for row, level in enumerate(self._levels[i]):
                entry = part.chunk.level(level)
                self._sizes[row, i] = entry.length
                self._losses[row, i] = (entry.expected_kl or 0.0) * tokens
                self._decodes[row, i] = tokens * loader.costs.mean(_decode_key(part.codec, level), 1e-4)
            gap = text(part.gap, part.start)
            self._text[i] = gap + text(tokens, part.start)
            splice = tokens * loader.costs.mean(f"splice/{loader.model}", 0.0)
            self._splice[i] = gap + splice + text(part.head, part.start)
        end = parts[-1].start + len(parts[-1].token_ids) if parts else prefix
        self._tail = text(tail, end)
        self._model_free = self.began + text(prefix, 0)

    def _work(self, now: float, link_free: float) -> Work:
        """What is left of the request from the part the model is at."""
        a = self._at
        status = self._status[a:]
        text, splice = self._text[a:].copy(), self._splice[a:].copy()
        if self._done and len(text):
            share = 1 - self._done / len(self.parts[a].token_ids)
            text[0] *= share
        ready = np.zeros(len(text))
        for j, state in enumerate(status):
            if state == "failed":
                splice[j] = text[j]
            elif state not in ("waiting", "ready"):
                ready[j] = self._expected(a + j, now)
        return Work(
            self._sizes[:, a:],
            self._losses[:, a:],
            self._decodes[:, a:],
            text,
            splice,
            self._tail,
            0,
            np.array([state != "waiting" for state in status], bool),
            ready,
            max(self._model_free - now, 0.0),
            link_free,
        )

    def _expected(self, i: int, now: float) -> float:
        """Seconds until part ``i`` is decoded, as far as one can tell."""
        status = self._status[i]
        if status == "ready":
            return 0.0
        if status in ("failed", "waiting"):
            return (
                math.inf
                if status == "failed"
                else self._loader.bytes_in_flight(self.priority) / self._loader.rate(now) + 0.1
            )
        level = self.outcomes[i].level
        decode = float(self._decodes[self._levels[i].index(level), i]) if level in self._levels[i] else 0.0
        if status in ("arrived", "decoding"):
            waiting = sum(1 for state in self._status[self._at : i + 1] if state == "decoding")
            return decode * max(1.0, waiting / self._loader.threads)
        ahead = sum(left for j, left in self._left.items() if j <= i)
        # What has been silent for a while is likely to stay so for as long again, whatever the link's rate was.
        silent = now - self._progress[i][0] - self._loader.meter.round_trip.seconds()
        return max(ahead / self._loader.rate(now), silent) + decode

    def _slice_tokens(self) -> int:
        rate = 256 / max(self._loader.text.seconds(256, self.parts[self._at].start), 1e-9)
        return int(max(32 if rate < SLOW_MODEL else 64, rate * SLICE_SECONDS))

    def _slower_than_computing(self) -> str | None:
        """Why a local store is not worth asking, or None. Only what was measured counts."""
        if not self._loader.text.known or not self.parts:
            return None
        decode = sum(float(self._decodes[0, i]) for i in range(len(self.parts)))
        stored, text = decode / self._loader.threads + float(self._splice.sum()), float(self._text.sum())
        if stored < text + NOTICEABLE:
            return None
        decoders = {_decode_key(part.codec, part.level) for part in self.parts}
        for name in (f"splice/{self._loader.model}", *decoders):
            self._loader.costs.doubt(name)
        return f"computing is faster here: {text * 1e3:.0f} ms against {stored * 1e3:.0f} ms from the store"

    def _segments(self, i: int, level: int) -> Segment:
        (segment,) = self.parts[i].chunk.level(level).segments
        return segment

    def _event(
        self,
        what: Literal["fetch", "decode", "splice", "compute"],
        i: int,
        start: float,
        stop: float,
        level: int | None = None,
    ) -> None:
        self.events.append(Event(what, i, start - self.began, stop - self.began, level))


def _decode_key(codec: Codec, level: int) -> str:
    return f"decode/{codec.profile.hash[:16]}/{level}"
