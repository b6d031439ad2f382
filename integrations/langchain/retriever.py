"""CacheGenRetriever: what it returns is on its way from the store while the prompt is still being built."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import ConfigDict, Field

from cachegen_rag.cache import KVCache
from cachegen_rag.integrations.langchain.chat_model import ChatCacheGen
from cachegen_rag.integrations.langchain.vectorstore import cache_of, prepare


class CacheGenRetriever(BaseRetriever):
    """Wraps any retriever. Found documents are made known to the cache, and their KV is fetched ahead.

    So a chain that puts the retrieved texts into a plain prompt hits without any further change. ``k`` bounds the
    number of documents, here or in ``invoke(query, k=...)``.
    """

    retriever: BaseRetriever
    cache: KVCache | ChatCacheGen = Field(exclude=True, repr=False)
    k: int | None = None

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def _inner(self, k: int | None) -> dict[str, Any]:
        return {"k": k} if k is not None and isinstance(self.retriever, VectorStoreRetriever) else {}

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        k = self.k if k is None else k
        found = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **self._inner(k), **kwargs)[:k]
        prepare(cache_of(self.cache), found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        k = self.k if k is None else k
        config = {"callbacks": run_manager.get_child()}
        found = (await self.retriever.ainvoke(query, config, **self._inner(k), **kwargs))[:k]  # type: ignore[arg-type]
        await run_in_executor(None, lambda: prepare(cache_of(self.cache), found))
        return found
