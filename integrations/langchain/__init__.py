"""LangChain: a chat model, a vector store wrapper, a retriever and agent middleware over a KVCache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachegen_rag.integrations.langchain.chat_model import ChatCacheGen as ChatCacheGen
    from cachegen_rag.integrations.langchain.middleware import CacheGenRAGMiddleware as CacheGenRAGMiddleware
    from cachegen_rag.integrations.langchain.retriever import CacheGenRetriever as CacheGenRetriever
    from cachegen_rag.integrations.langchain.vectorstore import KVCachedVectorStore as KVCachedVectorStore

_HOMES = {
    "CacheGenRAGMiddleware": "middleware",
    "CacheGenRetriever": "retriever",
    "ChatCacheGen": "chat_model",
    "KVCachedVectorStore": "vectorstore",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"cachegen_rag.integrations.langchain.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
