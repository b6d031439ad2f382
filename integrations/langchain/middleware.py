"""CacheGenRAGMiddleware: retrieval for ``create_agent``, with documents that keep their boundaries.

    agent = create_agent(llm, tools, middleware=[CacheGenRAGMiddleware(retriever)])

Needs the ``langchain`` package.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor

from cachegen_rag.cache import KVCache
from cachegen_rag.errors import ConfigError, MissingDependencyError
from cachegen_rag.integrations.langchain.chat_model import ChatCacheGen
from cachegen_rag.integrations.langchain.vectorstore import cache_of, prepare

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest
    from langchain.agents.middleware.types import AgentState, ModelResponse, ToolCallRequest
except ImportError as error:
    raise MissingDependencyError("CacheGenRAGMiddleware needs langchain: pip install 'langchain>=1.0'") from error

MAX_REMEMBERED = 256
"""Human messages whose documents are remembered, for later steps of their agent runs."""


class CacheGenRAGMiddleware(AgentMiddleware[AgentState[Any], Any]):
    """Gives the model documents for the last human message, and fetches ahead what retriever tools return.

    Parameters
    ----------
    retriever : asked once a human message; its documents reach the model as ``documents=``, so their KV is spliced.
        None leaves retrieval to the agent's tools: documents in the ``artifact`` of a tool's result are fetched from
        the store while the agent goes on.
    k : documents at most.
    cache : the cache that fetches ahead; by default that of the agent's own ChatCacheGen.
    """

    def __init__(
        self,
        retriever: BaseRetriever | None = None,
        *,
        k: int | None = None,
        cache: KVCache | ChatCacheGen | None = None,
    ) -> None:
        super().__init__()
        self.retriever = retriever
        self.k = k
        self._cache = cache
        self._found: OrderedDict[str, list[Document]] = OrderedDict()
        self._lock = threading.Lock()

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        asked = self._asked(request)
        if asked is None or self.retriever is None:
            return handler(request)
        documents = self._remembered(asked)
        if documents is None:
            documents = self._remember(asked, self.retriever.invoke(asked.text))
        return handler(_with(request, documents))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        asked = self._asked(request)
        if asked is None or self.retriever is None:
            return await handler(request)
        documents = self._remembered(asked)
        if documents is None:
            documents = self._remember(asked, await self.retriever.ainvoke(asked.text))
        return await handler(_with(request, documents))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        result = handler(request)
        self._fetch_ahead(result)
        return result

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        result = await handler(request)
        await run_in_executor(None, self._fetch_ahead, result)
        return result

    def _asked(self, request: ModelRequest[Any]) -> HumanMessage | None:
        """The last human message."""
        if not isinstance(request.model, ChatCacheGen):
            raise ConfigError(f"CacheGenRAGMiddleware needs a ChatCacheGen model, got {type(request.model).__name__}")
        if self._cache is None:
            self._cache = request.model
        return next((m for m in reversed(request.messages) if isinstance(m, HumanMessage)), None)

    def _remembered(self, asked: HumanMessage) -> list[Document] | None:
        """What was found for this very message in an earlier step of the agent's loop."""
        with self._lock:
            return self._found.get(asked.id) if asked.id is not None else None

    def _remember(self, asked: HumanMessage, documents: list[Document]) -> list[Document]:
        documents = documents[: self.k]
        if asked.id is not None:
            with self._lock:
                self._found[asked.id] = documents
                while len(self._found) > MAX_REMEMBERED:
                    self._found.popitem(last=False)
        return documents

    def _fetch_ahead(self, result: Any) -> None:
        artifact = result.artifact if isinstance(result, ToolMessage) else None
        documents = (
            [item for item in artifact if isinstance(item, Document)] if isinstance(artifact, (list, tuple)) else []
        )
        if documents and self._cache is not None:
            prepare(cache_of(self._cache), documents)


def _with(request: ModelRequest[Any], documents: list[Document]) -> ModelRequest[Any]:
    given = list(request.model_settings.get("documents") or ())
    return request.override(model_settings={**request.model_settings, "documents": [*given, *documents]})
