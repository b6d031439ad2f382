"""KVCachedVectorStore: a vector store whose documents have their KV computed when they are added.

store = KVCachedVectorStore(InMemoryVectorStore(embeddings), cache)
index(documents, record_manager, store, cleanup="incremental", source_id_key="source", key_encoder="sha256")
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStore

from cachegen_rag.cache import KVCache
from cachegen_rag.errors import ConfigError
from cachegen_rag.integrations.langchain.chat_model import ChatCacheGen
from cachegen_rag.integrations.langchain.references import References, text_key

log = logging.getLogger(__name__)

MAX_FAILURES = 1000
"""Reasons of documents without KV that are remembered; older ones are dropped."""


def cache_of(source: KVCache | ChatCacheGen) -> KVCache:
    """The KVCache of a chat model, or the one given."""
    return source.open_cache() if isinstance(source, ChatCacheGen) else source


class KVCachedVectorStore(VectorStore):
    """Wraps any VectorStore: adding computes and stores KV, deleting drops it when no document has that text any more.

    Parameters
    ----------
    store : the vector store to wrap. Everything it can do remains reachable.
    cache : a KVCache, or a ChatCacheGen whose cache is used.
    references : file of the table of which id has which text; without one the table lives in memory, and KV of
        documents added by an earlier process is left to the store's own eviction.
    background : compute KV on a thread of its own; ``flush()`` waits for it. Queries never wait: a document whose KV
        is not there yet is answered from its text.
    progress : called with ``(documents done, documents in this batch, tokens computed, seconds)``.

    Notes
    -----
    A failure to compute or store KV never fails an addition: ``failures`` holds the last reasons. Where the wrapped
    store has no ``get_by_ids``, or everything is deleted at once (``ids=None``), KV is left to the store's eviction.
    """

    def __init__(
        self,
        store: VectorStore,
        cache: KVCache | ChatCacheGen,
        *,
        references: str | Path | None = None,
        background: bool = False,
        progress: Callable[[int, int, int, float], None] | None = None,
    ) -> None:
        self.store = store
        self.references = References(references)
        self.failures: deque[tuple[str, str]] = deque(maxlen=MAX_FAILURES)
        self._source = cache
        self._progress = progress
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cachegen-prefill") if background else None
        self._pending: set[Future[None]] = set()
        self._lock = threading.Lock()

    @property
    def cache(self) -> KVCache:
        """The KVCache."""
        return cache_of(self._source)

    @property
    def embeddings(self) -> Embeddings | None:
        """The wrapped store's."""
        return self.store.embeddings

    # ---- adding and deleting ----

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        before = self._texts_of(_given_ids(documents, kwargs))
        ids = self.store.add_documents(documents, **kwargs)
        self._added(documents, ids, before)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        before = await run_in_executor(None, self._texts_of, _given_ids(documents, kwargs))
        ids = await self.store.aadd_documents(documents, **kwargs)
        await run_in_executor(None, self._added, documents, ids, before)
        return ids

    def add_texts(
        self, texts: Iterable[str], metadatas: list[dict] | None = None, *, ids: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        documents = _documents(texts, metadatas, ids)
        before = self._texts_of(ids or ())
        made = self.store.add_texts([d.page_content for d in documents], metadatas, ids=ids, **kwargs)
        self._added(documents, made, before)
        return made

    async def aadd_texts(
        self, texts: Iterable[str], metadatas: list[dict] | None = None, *, ids: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        documents = _documents(texts, metadatas, ids)
        before = await run_in_executor(None, self._texts_of, ids or ())
        made = await self.store.aadd_texts([d.page_content for d in documents], metadatas, ids=ids, **kwargs)
        await run_in_executor(None, self._added, documents, made, before)
        return made

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        texts = self._texts_of(ids or ())
        done = self.store.delete(ids, **kwargs)
        if done is not False:
            self._deleted(ids, texts)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        texts = await run_in_executor(None, self._texts_of, ids or ())
        done = await self.store.adelete(ids, **kwargs)
        if done is not False:
            await run_in_executor(None, self._deleted, ids, texts)
        return done

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all KV that was asked for is computed. False if ``timeout`` seconds were not enough."""
        with self._lock:
            pending = set(self._pending)
        return not wait(pending, timeout).not_done

    def close(self) -> None:
        """Finish the background work and close the table of references; wrapped store and cache stay open."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self.references.close()

    def _added(self, documents: Sequence[Document], ids: Sequence[str], before: dict[str, str]) -> None:
        keys = [text_key(d.page_content) for d in documents]
        replaced = self.references.assign(zip(map(str, ids), keys, strict=True))
        named = [Document(page_content=d.page_content, id=str(id)) for d, id in zip(documents, ids, strict=True)]
        self._do(lambda: self._prefill(named))
        self._do(lambda: self._forget(replaced, before))

    def _do(self, work: Callable[[], None]) -> None:
        """Now, or in the background after everything that was asked for before."""
        if self._pool is None:
            work()
            return
        job = self._pool.submit(work)
        with self._lock:
            self._pending = {f for f in self._pending if not f.done()} | {job}

    def _prefill(self, documents: Sequence[Document]) -> None:
        try:
            report = self.cache.prefill(documents, self._progress)
            self.failures.extend(report.skipped)
            for name, reason in report.skipped:
                log.warning("no KV for document %s: %s", name, reason)
        except Exception as error:
            log.warning("no KV for %d documents: %s", len(documents), error, exc_info=True)
            self.failures.extend((str(d.id), str(error)) for d in documents)

    def _texts_of(self, ids: Sequence[str]) -> dict[str, str]:
        """Texts of documents about to be deleted or replaced, as far as the wrapped store tells them."""
        try:
            found = self.store.get_by_ids(list(ids)) if ids else []
        except NotImplementedError:
            found = []
        return {text_key(d.page_content): d.page_content for d in found}

    def _deleted(self, ids: Sequence[str] | None, texts: dict[str, str]) -> None:
        unused = self.references.drop(self.references.ids() if ids is None else map(str, ids))
        self._do(lambda: self._forget(unused, texts))

    def _forget(self, keys: Iterable[str], texts: dict[str, str]) -> None:
        """Delete the KV of texts that nothing refers to. What cannot be deleted now is evicted some day."""
        for text in (texts[key] for key in keys if key in texts):
            try:
                self.cache.delete(text)
            except Exception as error:
                log.warning("KV of a deleted document stays: %s", error)

    # ---- searching: the wrapped store's, and what is found is known to the cache ----

    def _found(self, documents: list[Document]) -> list[Document]:
        prepare(self.cache, documents)
        return documents

    def _scored(self, found: list[tuple[Document, float]]) -> list[tuple[Document, float]]:
        prepare(self.cache, [document for document, _ in found])
        return found

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return self.store.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return await self.store.aget_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self._found(self.store.similarity_search(query, k, **kwargs))

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self._found(await self.store.asimilarity_search(query, k, **kwargs))

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return self._found(self.store.similarity_search_by_vector(embedding, k, **kwargs))

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return self._found(await self.store.asimilarity_search_by_vector(embedding, k, **kwargs))

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return self._scored(self.store.similarity_search_with_score(*args, **kwargs))

    async def asimilarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return self._scored(await self.store.asimilarity_search_with_score(*args, **kwargs))

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return self._found(self.store.max_marginal_relevance_search(query, k, fetch_k, lambda_mult, **kwargs))

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return self._found(await self.store.amax_marginal_relevance_search(query, k, fetch_k, lambda_mult, **kwargs))

    def max_marginal_relevance_search_by_vector(self, *args: Any, **kwargs: Any) -> list[Document]:
        return self._found(self.store.max_marginal_relevance_search_by_vector(*args, **kwargs))

    async def amax_marginal_relevance_search_by_vector(self, *args: Any, **kwargs: Any) -> list[Document]:
        return self._found(await self.store.amax_marginal_relevance_search_by_vector(*args, **kwargs))

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self.store._select_relevance_score_fn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "store":
            raise AttributeError(name)
        return getattr(self.store, name)

    @classmethod
    def from_texts(
        cls, texts: list[str], embedding: Embeddings, metadatas: list[dict] | None = None, **kwargs: Any
    ) -> Any:
        """Not possible: there is no store to wrap. Make the store first, then ``KVCachedVectorStore(store, cache)``."""
        raise ConfigError("make the vector store to wrap first: KVCachedVectorStore(store, cache).add_texts(texts)")


def prepare(cache: KVCache, documents: Sequence[Document]) -> None:
    """Documents that are about to be in a prompt: let the cache know their texts and begin to fetch their KV.

    Best effort: retrieval never fails because of the cache.
    """
    from cachegen_rag.inputs import as_document

    try:
        for document in documents:
            cache.known.add(as_document(document))
        cache.prefetch(documents)
    except Exception as error:
        log.warning("prefetch failed: %s", error)


def _documents(texts: Iterable[str], metadatas: list[dict] | None, ids: Sequence[str] | None) -> list[Document]:
    texts = list(texts)
    names: Iterator[str | None] = iter(ids) if ids is not None else iter([None] * len(texts))
    extra = metadatas or [{}] * len(texts)
    return [Document(page_content=t, metadata=m, id=id) for t, m, id in zip(texts, extra, names, strict=True)]


def _given_ids(documents: Sequence[Document], kwargs: dict[str, Any]) -> list[str]:
    """The ids that documents are about to be added under, where the caller chose them."""
    return list(kwargs.get("ids") or [d.id for d in documents if d.id is not None])
