"""KVCache: what an application holds. Documents go in once; prompts that contain them start answering sooner."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cachegen_rag import upkeep
from cachegen_rag.assembly import Assembler, Source
from cachegen_rag.codec import Codec
from cachegen_rag.codec.profile import Profile
from cachegen_rag.config import CacheArguments, expect, expect_callable
from cachegen_rag.errors import (
    ConfigError,
    RequestCancelledError,
    StoreError,
    UnknownLevelError,
)
from cachegen_rag.exact import leading
from cachegen_rag.foundation import Foundation
from cachegen_rag.gate import Gate, Keeper
from cachegen_rag.idle import IdleWork, Interrupted
from cachegen_rag.inputs import as_document, as_message, as_token_ids, listed
from cachegen_rag.known_texts import KnownTexts
from cachegen_rag.library import CHUNK_TOKENS, Library
from cachegen_rag.metrics import RequestRecord
from cachegen_rag.models.base import KVModel, Sampling, Token
from cachegen_rag.prefilling import Prefill, PrefillReport, Progress
from cachegen_rag.prompt import Document, Message, Prompt, build_prompt, document_tokens, with_documents
from cachegen_rag.recompute import Heads, Recompute
from cachegen_rag.results import CacheStats, Stream, Totals
from cachegen_rag.shadow import ANSWER_TOKENS, Shadow, ShadowCheck
from cachegen_rag.stores.base import Store, open_store
from cachegen_rag.streaming.pipeline import Loader
from cachegen_rag.trial import coded, place
from cachegen_rag.warm import WarmContext

T = TypeVar("T")

log = logging.getLogger(__name__)

PREFETCH_SECONDS = 10.0
"""How long a prefetch waits for a manifest."""

SETUP_SECONDS = 2.0
"""How long a request waits for what a remote store keeps of the model, its codec profile and its gate."""

EXACT_BYTES = 256 << 20
"""Stored bytes that learned leading combinations may take by default."""


class KVCache:
    """Compressed KV caches of documents for one model in one store. Thread-safe.

    Parameters
    ----------
    model : the engine. It loads on first use.
    store : a Store or a URL for ``open_store`` (``file://...``, ``memory://``, ``https://...``).
    profile : a codec Profile or the path of one; by default the one shipped for this model, else the one kept in
        the store, else one is calibrated from the first documents that are prefilled.
    level : quantization level that is read, 0 the finest; by default the profile's default level.
    levels : levels that are stored; by default the level that is read, on a remote store all lossy ones from the
        finest on.
    recompute : what is computed anew of spliced documents: a number of leading tokens of each, or a
        :class:`~cachegen_rag.recompute.Recompute` (a method and a budget); by default what the model's gate says that
        it needs, and nothing while it was not measured (see :meth:`calibrate_gate`).
    chunk_tokens : tokens of an independently decodable chunk.
    max_document_tokens : longer documents are cut, at index time and in prompts alike.
    salt : keeps the keys of tenants of one store apart.
    exact_bytes : bytes that repeated leading combinations (the text and the first documents) may take; see
        :meth:`learn`. 0 switches exact prefix reuse off.
    splice : False answers every request by plain prefill (and still stores documents).
    store_missed : compute and store documents that a request did not find in the store, when no request has run for a
        moment; a request that comes interrupts it. By default on a store that is not remote: readers of a shared one
        often may not write. ``idle.flush()`` waits for it.
    shadow_fraction : of the spliced requests, how many are computed in full too, when no request has run for a moment:
        ``stats()`` then says how far splicing is from the text on this application's requests.
    slo : seconds to the first token. On a remote store the level of each chunk is then chosen to keep it with the
        least loss; without it the first token comes as early as it can at ``level``.
    loader : makes the loader from the store and a name for this engine's costs.
    on_request : called with every finished RequestRecord. on_shadow : called with every finished ShadowCheck.

    Raises
    ------
    ConfigError, StoreError
        A setting is wrong; the store cannot be opened. Problems of single requests never raise because of stored
        bytes: they are answered from the text, with the reason in the record.
    """

    def __init__(
        self,
        model: KVModel,
        store: Store | str | Path,
        *,
        profile: Profile | str | Path | None = None,
        level: int | None = None,
        levels: Sequence[int] | None = None,
        recompute: int | Recompute | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        max_document_tokens: int | None = None,
        salt: str = "",
        splice: bool = True,
        store_missed: bool | None = None,
        shadow_fraction: float = 0.0,
        exact_bytes: int = EXACT_BYTES,
        slo: float | None = None,
        loader: Callable[[Store, str], Loader] = Loader,
        on_request: Callable[[RequestRecord], None] | None = None,
        on_shadow: Callable[[ShadowCheck], None] | None = None,
    ) -> None:
        CacheArguments.check(
            level=level,
            levels=levels,
            chunk_tokens=chunk_tokens,
            max_document_tokens=max_document_tokens,
            salt=salt,
            splice=splice,
            store_missed=store_missed,
            shadow_fraction=shadow_fraction,
            exact_bytes=exact_bytes,
            slo=slo,
            loader=loader,
            on_request=on_request,
            on_shadow=on_shadow,
        )
        expect("recompute", recompute, (int, Recompute, type(None)), "a number of tokens or a Recompute")
        if not isinstance(store, (str, Path)) and not callable(getattr(store, "put", None)):
            raise ConfigError(f"store must be a Store, a URL or a path, got {type(store).__name__}")
        if not callable(getattr(model, "session", None)):
            raise ConfigError(f"model must be a KVModel, as LlamaCppModel(path) is, got {type(model).__name__}")
        if isinstance(recompute, int):
            if recompute < 0:
                raise ConfigError(f"recompute = {recompute}: must be a number of tokens from 0")
            recompute = Recompute(Heads(recompute), 1.0) if recompute else Recompute()
        self.model = model
        self.store: Store = open_store(store) if isinstance(store, (str, Path)) else store
        self._recompute = recompute
        self.known = KnownTexts()
        self._max_document_tokens = max_document_tokens
        self._chunk_tokens = chunk_tokens
        self._splice = splice
        self._store_missed = not self.store.remote if store_missed is None else store_missed
        self._slo = slo
        self._base = Foundation(
            model,
            self.store,
            profile=profile,
            level=level,
            levels=levels,
            chunk_tokens=chunk_tokens,
            salt=salt,
            exact_bytes=exact_bytes,
            loader=loader,
        )
        self.idle = IdleWork()
        self._on_request, self._on_shadow = on_request, on_shadow
        self._shadow = Shadow(shadow_fraction)
        self._totals = Totals()

    # ---- what the cache stands on, made on first use ----

    @property
    def refusal(self) -> str | None:
        """Why nothing is spliced (the model's or the settings' reason), or None."""
        return "splicing is switched off" if not self._splice else self.model.refusal

    @property
    def warm(self) -> WarmContext:
        """The context documents are computed behind."""
        return self._base.warm

    @property
    def gate(self) -> Keeper:
        """Whether this model may be spliced, and with how much recompute, if that was measured."""
        return self._base.gate

    def calibrate_gate(self, **options: Any) -> Gate:
        """Measure how much recompute this model needs at the level that is read, and keep that in the store.

        ``options`` are those of :func:`cachegen_rag.gate.measure`. Takes minutes on a CPU. Raises StoreError.
        """
        library = self.library()
        codec = None if library is None else library.codec
        return self.gate.calibrate(coder=place if codec is None else coded(codec, self.level(codec)), **options)

    @property
    def recompute(self) -> Recompute:
        """What is computed anew of spliced documents."""
        return self.gate.recompute if self._recompute is None else self._recompute

    def library(self, texts: Sequence[str] = ()) -> Library | None:
        """The stored documents, or None while no codec profile is known; ``texts`` lets one be calibrated.

        Raises StoreError if the store's profile cannot be read.
        """
        return self._base.library(texts)

    def check(self) -> None:
        """Load the model and try the settings against its profile, before any work. Raises what is wrong with them."""
        if self.model.refusal is None:
            self.library()

    def level(self, codec: Codec) -> int:
        """The level that is read."""
        return self._base.level(codec)

    def stored_levels(self, codec: Codec) -> tuple[int, ...]:
        """The levels that are stored."""
        return self._base.stored_levels(codec)

    # ---- documents ----

    def prefill(self, documents: Iterable[Any], progress: Progress | None = None) -> PrefillReport:
        """Compute, encode and store the KV of every document that is not stored yet.

        ``documents`` are texts, :class:`~cachegen_rag.prompt.Document` or anything with ``page_content``. May be
        interrupted and run again, by several threads and processes at once.

        Raises StoreError if the store cannot be written. A document that cannot be stored otherwise (too long for
        the context, a model that is not spliced) is skipped with its reason.
        """
        expect_callable("progress", progress)
        items = [as_document(document) for document in listed(documents)]
        library = None if self.model.refusal else self.library([item.text for item in items])
        for item in items:
            self.known.add(item)
        run = Prefill(self.model, library, items, progress)
        if library is not None:
            with self.idle.request():
                self._fill(run, library)
        else:
            run.skip_all(self.model.refusal or "no codec profile: there is no text to calibrate one from")
        return run.report

    def _fill(self, run: Prefill, library: Library) -> None:
        run.run(self.warm, self.stored_levels(library.codec), self._chunk_tokens, self._max_document_tokens)

    def _store_later(self, library: Library, prompt: Prompt, missing: Sequence[int]) -> int:
        """Have these documents of a prompt stored when idle; how many tokens they have that did not wait already."""
        tokens = 0
        for segment in (prompt.segments[i] for i in missing if self._store_missed):
            document = Document(segment.text, segment.doc_id)

            def work(interrupted: Interrupted, document: Document = document) -> None:
                self._fill(Prefill(self.model, library, [document], cancelled=interrupted), library)

            if self.idle.add(library.key(segment.token_ids), work):
                tokens += len(segment)
        return tokens

    def key(self, document: Any) -> str | None:
        """The content key of a document; None while no codec profile is known, or if the document is empty."""
        library = self.library()
        ids, _ = document_tokens(self.model, as_document(document).text, self._max_document_tokens)
        return library.key(ids) if library is not None and ids else None

    def contains(self, document: Any) -> bool:
        """Whether the document's KV is stored whole at the level that is read."""
        key, library = self.key(document), self.library()
        return key is not None and library is not None and library.contains(key, (self.level(library.codec),))

    def prefetch(self, documents: Iterable[Any]) -> None:
        """Begin to read the KV of documents that a request is about to have. Best effort; returns at once.

        Only a remote store gains by it: the bitstreams are on their way while the prompt is still being built.
        """
        if self.store.remote:
            items = listed(documents)
            self._base.in_background(lambda: self._prefetch(items))

    def _prefetch(self, documents: Sequence[Any]) -> None:
        try:
            library, ahead = self._base.library(deadline=time.monotonic() + PREFETCH_SECONDS), self._base.ahead
            if library is None or ahead is None or self.refusal is not None:
                return
            manifests = [(key, ahead.prefetch("ac", key)) for key in map(self.key, documents) if key is not None]
            for key, reading in manifests:
                data = reading.result(PREFETCH_SECONDS)
                if data is not None:
                    for chunk in library.read_manifest(key, data).chunks:
                        for segment in chunk.level(self.level(library.codec)).segments:
                            ahead.prefetch("cas", segment.sha256, segment.length)
        except Exception as error:  # the request itself will find out, and say why
            log.info("prefetch gave up: %s", error)

    def learn(self, limit: int | None = None) -> int:
        """Compute and store leading combinations that requests have repeated (at most ``limit``); how many were stored.

        Call it when the application is idle: each takes a prefill. Later requests that begin so reuse them exactly.
        """
        expect("limit", limit, (int, type(None)), "a whole number or None")
        done = 0
        while self._base.exact is not None and (limit is None or done < limit):
            with self.model.session() as session:
                if not self._base.exact.compute_pending(session):
                    break
            done += 1
        return done

    def store_leading(self, prompt: Prompt, documents: int) -> bool:
        """Compute and store the joint KV of everything up to the prompt's ``documents``-th document, for exact reuse.

        False if nothing can be stored: the model is refused, or no codec profile is known.
        """
        expect("documents", documents, int, "a whole number")
        if self.refusal is not None or self.library() is None or self._base.exact is None:
            return False
        if not 1 <= documents <= len(prompt.documents):
            raise ConfigError(f"documents = {documents}: the prompt has {len(prompt.documents)}")
        with self.model.session() as session:
            self._base.exact.store(session, leading(prompt, documents))
        return True

    def delete(self, document: Any) -> bool:
        """Forget a document: its manifest, and bitstreams that no other document has. False: it was not stored."""
        item = as_document(document)
        self.known.discard(item.text)
        key = self.key(item)
        return key is not None and upkeep.delete_document(self.store, key)

    def verify(self, *, repair: bool = False) -> dict[str, Any]:
        """Check every stored object; see :func:`cachegen_rag.upkeep.verify_store`."""
        return upkeep.verify_store(self.store, repair=repair)

    def stats(self) -> CacheStats:
        """Counts since the cache was opened, and the store's size."""
        stats = dataclasses.replace(self._totals.stats(), **self._shadow.figures)
        try:
            stats.store_bytes = self.store.size()
            stats.store_documents = sum(1 for _ in self.store.keys("ac"))
        except StoreError:
            pass
        return stats

    # ---- prompts ----

    def prompt(
        self,
        messages: Sequence[Message | Mapping[str, str]],
        documents: Sequence[Any] = (),
        *,
        template_args: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A prompt of chat messages, with ``documents`` in front of the last user message's text."""
        expect("messages", messages, Iterable, "a list of messages")
        expect("template_args", template_args, (Mapping, type(None)), "a mapping or None")
        turns = with_documents(
            [as_message(message) for message in messages], [as_document(item) for item in listed(documents)]
        )
        return build_prompt(
            self.model, turns, max_document_tokens=self._max_document_tokens, template_args=template_args
        )

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        spliced: bool = True,
        cancelled: Callable[[], bool] | None = None,
    ) -> Stream:
        """Answer ``prompt``. Documents whose KV is stored are spliced; ``spliced=False`` computes everything.

        ``cancelled`` is asked between steps; when it says True, iterating the stream raises RequestCancelledError.

        Raises ContextOverflowError before any compute if prompt and answer do not fit.
        """
        _check_prompt(prompt)
        expect("sampling", sampling, (Sampling, type(None)), "a Sampling or None")
        expect_callable("cancelled", cancelled)
        sampling = sampling or Sampling()
        prompt.require_fits(self.model.n_ctx, min(sampling.max_tokens or 1, self.model.n_ctx))
        record = RequestRecord(model=self.model.name, prompt_tokens=len(prompt))
        return Stream(record, self.idle.during(self._tokens(prompt, sampling, spliced, record, cancelled)))

    def _tokens(
        self,
        prompt: Prompt,
        sampling: Sampling,
        spliced: bool,
        record: RequestRecord,
        cancelled: Callable[[], bool] | None,
    ) -> Iterator[Token]:
        began = time.perf_counter()
        record.started_at = time.time()
        answer: list[int] = []  # its first tokens
        assembler: Assembler | None = None
        try:
            source, refusal = self._source(spliced)
            assembler = Assembler(source, prompt, record, refusal)
            assembler.look_up()
            waiting = time.perf_counter()
            with self.model.session() as session:
                record.wait_ms = (time.perf_counter() - waiting) * 1e3
                session.cancelled = cancelled
                assembler.build(session)
                if source is not None:
                    record.stored_tokens = self._store_later(source.library, prompt, assembler.missing)
                for token in session.generate(sampling):
                    if not record.completion_tokens:
                        record.ttft_ms = (time.perf_counter() - began) * 1e3
                    record.completion_tokens += 1
                    record.finish_reason = token.finish_reason
                    record.total_ms = (time.perf_counter() - began) * 1e3
                    if len(answer) < ANSWER_TOKENS:
                        answer.append(token.id)
                    yield token
                    if cancelled is not None and cancelled():
                        raise RequestCancelledError("the request was cancelled while its answer was generated")
        finally:
            if assembler is not None:
                assembler.close()
            record.total_ms = (time.perf_counter() - began) * 1e3
            if self._base.exact is not None and spliced:
                self._base.exact.observe(prompt)
            self._totals.count(record)
            _tell("on_request", self._on_request, record)
        self._check_later(prompt, answer, record)

    def _check_later(self, prompt: Prompt, answer: list[int], record: RequestRecord) -> None:
        """Have a spliced request computed in full when idle, if it is drawn."""
        spliced = any(part.source == "store" for part in record.segments)
        name = self._shadow.draw() if spliced and answer else None
        if name is None:
            return

        def check(interrupted: Interrupted) -> None:
            full, changed = (self._logits(prompt, answer, way, interrupted) for way in (False, True))
            found = self._shadow.check(self.model.name, full, changed)
            log.info("shadow check: KL %.3f, first choice the same in %.0f %%", found.kl, 100 * found.top1)
            _tell("on_shadow", self._on_shadow, found)

        self.idle.add(name, check)

    def logits(self, prompt: Prompt, answer: Sequence[int], *, spliced: bool = True) -> NDArray[np.float32]:
        """Logits float32 ``[len(answer), vocabulary]`` that the model gives each token of ``answer`` behind ``prompt``.

        For comparing the spliced path with the text path. Not counted as a request.

        Raises ConfigError if ``answer`` is empty or not token ids, ModelError for ids that are not in the vocabulary,
        ContextOverflowError if prompt and answer do not fit.
        """
        _check_prompt(prompt)
        return self._logits(prompt, as_token_ids("answer", answer), spliced, None)

    def _logits(
        self, prompt: Prompt, answer: Sequence[int], spliced: bool, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.float32]:
        prompt.require_fits(self.model.n_ctx, len(answer))
        source, refusal = self._source(spliced)
        assembler = Assembler(source, prompt, RequestRecord(), refusal)
        assembler.look_up()
        with self.model.session() as session:
            session.cancelled = cancelled
            assembler.build(session)
            session.truncate(len(prompt) - 1)
            logits = session.decode([prompt.token_ids[-1], *answer[:-1]], logits=True)
        assert logits is not None
        return logits

    def _source(self, spliced: bool) -> tuple[Source | None, str | None]:
        """What a prompt is assembled from, or why nothing is spliced. Never raises because of stored bytes."""
        refusal = self.refusal if spliced else "spliced=False was asked for"
        if refusal is not None:
            return None, refusal
        try:
            deadline = time.monotonic() + SETUP_SECONDS if self.store.remote else None
            library = self._base.library_soon(deadline)
        except (StoreError, UnknownLevelError) as error:  # the store's profile: cannot be read, lacks the level
            return None, f"no usable codec profile for this model: {error}"
        if library is None or self._base.loader is None:
            return None, "no codec profile for this model yet: prefill documents or calibrate"
        level, layers = self.level(library.codec), self.model.shape.layers
        closed = self.gate.refusal(deadline)
        recompute = self.recompute if closed is None else Recompute()  # closed or unreadable: there is none to be had
        return Source(library, self._base.loader, level, recompute, layers, self._base.exact, self._slo, closed), None

    def close(self) -> None:
        """Stop the loader's threads and close the store. The model stays open.

        Requests that are under way go on and compute what they have not loaded.
        """
        self._base.stop_background()
        if self.store.remote:
            self.store.close()  # first: it ends the reads that others may wait for
        self.idle.close()
        self._base.close()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_prompt(prompt: Prompt) -> None:
    expect("prompt", prompt, Prompt, "a Prompt, as KVCache.prompt() makes it")
    if not len(prompt):
        raise ConfigError("the prompt is empty")


def _tell(name: str, observer: Callable[[T], None] | None, what: T) -> None:
    """Call an application's observer, which never fails a request."""
    if observer is not None:
        try:
            observer(what)
        except Exception:
            log.exception("%s failed", name)


__all__ = ["CacheStats", "KVCache", "PrefillReport", "Stream"]
