"""Exact prefix reuse: leading runs of prompts whose joint KV is stored, so that hot combinations cost no quality.

A run is the fixed text before the documents, or that text with the first document, the first two, and so on. Its KV
is computed for exactly these tokens, so taking it is what any prefix cache does; only the codec's loss is left. Runs
are stored like documents, cut at the segments' ends: a run's objects are the first objects of every longer run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import pairwise

from cachegen_rag.errors import BitstreamError, CacheGenError, StoreError
from cachegen_rag.library import CHUNK_TOKENS, Library, chunk_ranges
from cachegen_rag.manifest import Manifest
from cachegen_rag.models.base import Session
from cachegen_rag.prefixes import PrefixLearner, run_key
from cachegen_rag.prompt import Prompt
from cachegen_rag.splice import leading_runs

log = logging.getLogger(__name__)

MAX_PENDING = 64
"""Runs that wait to be computed; the oldest are forgotten first."""

LOOK_UP_SECONDS = 0.5
"""How long all look-ups of one request at a remote store may take."""

MAX_SEEN = 1024
"""Requests that wait to be counted while the lock is held; the oldest are forgotten first."""


class ExactRuns:
    """Leading runs in a store, and which of them are worth their bytes.

    library : of the model's fingerprint without a warm context: a run is computed behind nothing.
    budget : bytes that the runs learned here may take. level : level that runs are stored and read at.
    """

    def __init__(self, library: Library, budget: int, level: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.library, self._level, self._chunk_tokens = library, level, chunk_tokens
        shape = library.codec.profile.shape
        bytes_per_token = shape.elements_per_token * library.codec.bits_per_element(level) / 8
        self._learner = PrefixLearner(budget, bytes_per_token)
        self._stored: dict[str, str] = {}  # run key: store key
        self._pending: OrderedDict[str, Prompt] = OrderedDict()
        self._seen: deque[Prompt] = deque(maxlen=MAX_SEEN)
        self._lock = threading.Lock()

    @property
    def level(self) -> int:
        """The level that runs are stored and read at."""
        return self._level

    def find(self, prompt: Prompt) -> tuple[int, Manifest] | None:
        """The longest leading run that is stored, as its number of segments and its manifest.

        On a remote store only runs that were stored by this process are looked for: a look-up there costs a round trip.
        """
        remote = self.library.store.remote
        deadline = time.monotonic() + LOOK_UP_SECONDS if remote else None
        for segments in leading_runs(prompt):
            if not any(i < segments for i in prompt.documents):
                continue  # text alone is computed as fast as it is read
            if remote and run_key(prompt, segments) not in self._stored:
                continue
            tokens = prompt.offsets[segments]
            try:
                manifest = self.library.manifest(self.library.key(prompt.token_ids[:tokens]), deadline)
            except (LookupError, BitstreamError, StoreError):
                continue
            if manifest.tokens == tokens:
                return segments, manifest
        return None

    def observe(self, prompt: Prompt) -> None:
        """Count a request; a run that has become worth storing is computed by the next :meth:`compute_pending`.

        Never waits: a stream's end may come while this very thread holds the lock, when the garbage collector finds
        a stream that nobody reads any more. Whoever has the lock counts it then, or the next to come.
        """
        self._seen.append(prompt)
        if self._lock.acquire(blocking=False):
            try:
                self._count_seen()
            finally:
                self._lock.release()

    def _count_seen(self) -> None:
        """Learn from the requests that were seen. The lock is held."""
        while self._seen:
            prompt = self._seen.popleft()
            self._learner.observe(prompt)
            segments = self._learner.admit(prompt)
            if segments and any(i < segments for i in prompt.documents):
                key = run_key(prompt, segments)
                if key not in self._stored:
                    self._pending[key] = Prompt(prompt.segments[:segments])
                    while len(self._pending) > MAX_PENDING:
                        self._pending.popitem(last=False)

    @property
    def pending(self) -> int:
        """Runs that wait to be computed."""
        with self._lock:
            self._count_seen()
            return len(self._pending)

    def compute_pending(self, session: Session) -> bool:
        """Compute and store the next waiting run; evict what is no longer worth its bytes. False: none waited."""
        with self._lock:
            self._count_seen()
            if not self._pending:
                return False
            _, run = self._pending.popitem(last=False)
        try:
            self.store(session, run)
        except CacheGenError as error:
            log.warning("a leading run could not be stored: %s", error)
            return True
        with self._lock:
            for old in self._learner.evict(list(self._stored)):
                self.library.store.delete("ac", self._stored.pop(old))
        return True

    def store(self, session: Session, run: Prompt) -> Manifest:
        """Compute the whole of ``run``, leading segments of prompts, and store its KV; replaces the session's prompt.

        Raises what the library's ``put`` raises.
        """
        ids = run.token_ids
        edges = sorted({0, *(run.offsets[n] for n in leading_runs(run)), len(ids)})
        session.truncate(0)
        ranges: list[tuple[int, int]] = []
        for a, b in pairwise(edges):
            session.decode(ids[a:b])  # in the same parts every time: the same rows for every run that begins so
            ranges += [(a + start, a + stop) for start, stop in chunk_ranges(b - a, self._chunk_tokens)]
        kv = session.export(0, len(ids))
        key = self.library.key(ids)
        manifest = self.library.put(key, kv, (self._level,), ranges)
        self._stored[run_key(run, len(run.segments))] = key
        return manifest


def leading(prompt: Prompt, documents: int) -> Prompt:
    """The leading run of ``prompt`` that ends with its ``documents``-th document."""
    ends: Sequence[int] = prompt.documents
    return Prompt(prompt.segments[: ends[documents - 1] + 1])
