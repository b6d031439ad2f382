"""What a cache stands on, made on first use: warm context, gate, codec profile, library, loader.

Making it reads from the store, which may be remote, slow or down: whoever waits for it has a deadline, and a store that
does not answer is asked again in the background.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cachegen_rag.codec import Codec
from cachegen_rag.codec.profile import Profile
from cachegen_rag.errors import DeadlineExceededError, StoreError, StoreUnavailableError
from cachegen_rag.exact import ExactRuns
from cachegen_rag.gate import RETRY_SECONDS, Keeper
from cachegen_rag.library import Library
from cachegen_rag.models.base import KVModel
from cachegen_rag.profiles import find_profile
from cachegen_rag.stores.base import FetchStore, Store
from cachegen_rag.streaming.ahead import Ahead
from cachegen_rag.streaming.pipeline import Loader
from cachegen_rag.warm import WarmContext

BACKGROUND_SECONDS = 10.0
"""How long the codec profile may take to be read in the background."""


class Foundation:
    """Everything between one model and one store that is made once. Thread-safe. Parameters as in KVCache.

    exact, loader, ahead : leading combinations, transfers and what is read ahead (None if the store is not remote); all
        None until the library is there.
    """

    def __init__(
        self,
        model: KVModel,
        store: Store,
        *,
        profile: Profile | str | Path | None,
        level: int | None,
        levels: Sequence[int] | None,
        chunk_tokens: int,
        salt: str,
        exact_bytes: int,
        loader: Callable[[Store, str], Loader],
    ) -> None:
        self._model, self._store, self._profile = model, store, profile
        self._level, self._levels = level, levels
        self._chunk_tokens, self._salt, self._exact_bytes = chunk_tokens, salt, exact_bytes
        self._make_loader = loader
        self.exact: ExactRuns | None = None
        self.loader: Loader | None = None
        self.ahead: Ahead | None = None
        self._warm: WarmContext | None = None
        self._gate: Keeper | None = None
        self._library: Library | None = None
        self._making = threading.RLock()
        self._unreadable, self._retry_at = "", 0.0  # why the store's profile could not be read; when to try again
        self._background: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()
        self._closed = False

    @property
    def warm(self) -> WarmContext:
        """The context documents are computed behind."""
        with self._making:
            if self._warm is None:
                self._warm = WarmContext.for_model(self._model)
            return self._warm

    @property
    def gate(self) -> Keeper:
        """Whether this model may be spliced, and with how much recompute, if that was measured."""
        with self._making:
            if self._gate is None:
                path = Path(self._profile) if isinstance(self._profile, (str, Path)) else None
                self._gate = Keeper(self._model, self._store, self.warm, self._salt, path)
            return self._gate

    def level(self, codec: Codec) -> int:
        """The level that is read."""
        return codec.default_level if self._level is None else self._level

    def stored_levels(self, codec: Codec) -> tuple[int, ...]:
        """The levels that are stored."""
        if self._levels is not None:
            return tuple(sorted({*self._levels}))
        return tuple(sorted(codec.lossy_levels)) if self._store.remote else (self.level(codec),)

    def library(self, texts: Sequence[str] = (), *, deadline: float | None = None) -> Library | None:
        """The stored documents, or None while no codec profile is known; ``texts`` lets one be calibrated.

        ``deadline`` is a ``time.monotonic()`` value. Raises StoreError if the store's profile cannot be read.
        """
        if self._library is not None:
            return self._library
        if not self._making.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise DeadlineExceededError("the deadline passed while another thread makes or reads the codec profile")
        try:
            if self._library is None:
                profile = find_profile(self._model, self._store, self._profile, self._salt, texts, deadline=deadline)
                if profile is not None:
                    self._make(profile)
            return self._library
        finally:
            self._making.release()

    def library_soon(self, deadline: float | None) -> Library | None:
        """The library for a request that waits until ``deadline`` at most. Raises StoreError.

        After a failure the store is asked again in the background, where a slow link has time, and by requests only
        after a while: a server that does not answer costs one of them the deadline, not each.
        """
        if self._library is None and time.monotonic() < self._retry_at:
            raise StoreUnavailableError(self._unreadable)
        try:
            return self.library(deadline=deadline)
        except StoreError as error:
            if deadline is not None:
                self._unreadable, self._retry_at = str(error), time.monotonic() + RETRY_SECONDS
                self.in_background(lambda: self.library(deadline=time.monotonic() + BACKGROUND_SECONDS))
            raise

    def in_background(self, work: Callable[[], Any]) -> None:
        """Run ``work`` in a thread, one after the other; after the end, not at all. Its errors go nowhere."""
        with self._starting:
            if self._closed:
                return
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="cachegen-ahead")
            self._background.submit(work)

    def close(self) -> None:
        """Stop the threads and close the store. Waits for who is making something; ``stop_background`` does not."""
        self.stop_background()
        with self._making:
            if self.loader is not None:
                self.loader.close()
            self._store.close()

    def stop_background(self) -> None:
        """Begin nothing in the background any more. Does not wait."""
        with self._starting:
            self._closed, background = True, self._background
        if background is not None:
            background.shutdown(wait=False, cancel_futures=True)

    def _make(self, profile: Profile) -> None:
        model, store = self._model, self._store
        fingerprint = dataclasses.replace(model.fingerprint, context=self.warm.digest)
        codec = Codec(profile, fingerprint.digest())
        for level in (*(self._levels or ()), *(() if self._level is None else (self._level,))):
            codec.check_level(level)
        if self._exact_bytes:
            runs = Library(store, Codec(profile, model.fingerprint.digest(), sinks=True), self._salt)
            self.exact = ExactRuns(runs, self._exact_bytes, self.level(codec), self._chunk_tokens)
        engine = f"{model.fingerprint.weights[:16]}/{getattr(model, 'n_threads', '')}"
        if store.remote and isinstance(store, FetchStore):
            self.ahead = Ahead(store)
        reading: Any = self.ahead or store
        self.loader = self._make_loader(reading, engine)
        self._library = Library(store, codec, self._salt)  # last: whoever sees it sees all of it
