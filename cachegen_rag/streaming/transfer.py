"""One request's chunks on their way from the store into the engine: fetch, verify, decode, in step with the model.

The model asks in prompt order for what comes next and is told to take a chunk that is there, or to compute a few tokens
because that is better than waiting: the model works from the front while the link works on what lies ahead of it. Each
time the link is free the planner decides anew what it fetches. A chunk that cannot be had, for whatever reason, is
computed; nothing here raises because of stored bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import numpy as np

from cachegen_rag.errors import BitstreamError, CodecError, StoreError, StoreUnavailableError
from cachegen_rag.manifest import Segment
from cachegen_rag.models.base import KVTarget
from cachegen_rag.streaming.outlook import STRETCH_SECONDS, Outlook, decode_key
from cachegen_rag.streaming.parts import Compute, Event, Part, Ready, levels_of
from cachegen_rag.streaming.policy import Link

if TYPE_CHECKING:
    from cachegen_rag.streaming.pipeline import Loader

IN_FLIGHT = 4
"""Transfers of one request under way at once: enough to hide round trips, few enough to arrive in order."""
ASK_AHEAD = 16 << 10
"""Bytes still to come of what was asked for when the next chunk is asked for, at least: the link never runs dry."""
PIECE = 4096
"""Bytes that make a piece: a transfer from which fewer come is as good as silent."""
CLOSED = "the cache was closed"


class Transfer(Outlook):
    """The parts of one prompt. Made by ``Loader.open``; used by the thread that owns the session.

    due : ``time.monotonic()`` at which the first token should be there, or None.
    prefix, tail : tokens that the model computes before the first part and after the last.
    """

    def __init__(self, loader: Loader, parts: Sequence[Part], *, due: float | None, prefix: int, tail: int) -> None:
        super().__init__(loader, parts, due, prefix, tail)
        self.events: list[Event] = []
        self._lock = loader.lock
        self._changed = threading.Condition(self._lock)
        count = len(self.parts)
        self._targets: list[KVTarget | None] = [None] * count
        self._data: list[bytes | None] = [None] * count
        self._fetches: dict[int, Future[bytes | None]] = {}
        self._asked: dict[int, float] = {}
        self._heard: set[int] = set()  # parts whose answer has begun to arrive
        self._jobs: list[Future[None]] = []
        self._computing = False  # the model is at it, and decoding waits where cores are shared
        self._closed = False
        self._plan_compute = 0
        with self._lock:
            for i in range(count):
                if not self._levels[i]:
                    self._fail(i, f"level {self.parts[i].level} is not stored")

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
            self._loader.shared_cores = isinstance(target.keys[0], np.ndarray)
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
            self._computing = False
            self._passed(i, done)
            while True:
                now = time.monotonic()
                left = len(self.parts[i].token_ids) - done
                if self._status[i] == "ready":
                    self._model_free = now + self._splice[i]
                    return Ready()
                if self._status[i] == "failed":
                    return self._compute(i, done, left, self.outcomes[i].reason)
                self._model_free = now
                if self._status[i] in ("waiting", "fetching"):
                    self._schedule()
                if i in self._held():
                    self._decode_held()
                    continue
                if self._status[i] == "failed":
                    continue
                planned = self._status[i] == "waiting" and self._plan_compute > 0
                tokens = self._slice(i, done, STRETCH_SECONDS) if planned else 0
                if not planned and self._loader.fill:
                    tokens = self._rather_compute(i, done, now)
                if tokens:
                    return self._compute(i, done, tokens)
                self._decode_held()
                wait = self._expected(i, now)
                self._changed.wait(min(max(1.5 * wait, 0.005), 1.0) if self._loader.fill else 1.0)

    def _compute(self, i: int, done: int, tokens: int, reason: str | None = None) -> Compute:
        """Have the model compute ``tokens`` of part ``i``; decoding goes on first, or waits, where cores are shared.

        An engine's threads wait for each other at every operation: one that has to share its core stops them all.
        """
        if self._loader.shared_cores:
            self._computing = True
            if len(self._held()) >= self._loader.threads:
                self._decode_held()
            while "decoding" in self._status and not self._closed:
                self._changed.wait(1.0)
        self._model_free = time.monotonic() + self._loader.text.seconds(tokens, self.parts[i].start + done)
        return Compute(tokens, reason)

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
                if self._targets[i] is not None and not (self._loader.shared_cores and self._computing):
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

    # ---- decoding (the lock is held, except in _decode) ----

    def _held(self) -> list[int]:
        """Parts that have arrived and could be decoded."""
        here = enumerate(zip(self._status, self._targets, strict=True))
        return [i for i, (status, target) in here if status == "arrived" and target is not None]

    def _decode_held(self) -> None:
        for i in self._held():
            self._decode_soon(i)

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

    def _decoding(self) -> int:
        """How many parts are being decoded side by side."""
        return max(1, min(self._status.count("decoding"), self._loader.threads))

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
            beside = self._decoding()
            segment.verify(data)
            part.codec.decode_into(data, target, token_ids=part.token_ids)
            stop, side_by_side = time.monotonic(), (beside + self._decoding()) / 2
            outcome.decode_ms = (stop - began) * 1e3
            self._event("decode", i, began, stop, outcome.level)
            self._loader.costs.record(
                decode_key(part.codec, outcome.level), (stop - began) / side_by_side / len(part.token_ids)
            )
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
