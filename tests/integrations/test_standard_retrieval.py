"""LangChain's own suites for vector stores and retrievers, over a real in-memory store and the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from cachegen_rag.integrations.langchain import CacheGenRetriever, KVCachedVectorStore


class TestKVCachedVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tiny_llm: Any) -> Iterator[VectorStore]:  # type: ignore[override]
        store = KVCachedVectorStore(InMemoryVectorStore(self.get_embeddings()), tiny_llm)
        yield store
        assert not store.failures
        store.close()


class TestKVCachedVectorStoreInTheBackground(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tiny_llm: Any) -> Iterator[VectorStore]:  # type: ignore[override]
        store = KVCachedVectorStore(InMemoryVectorStore(self.get_embeddings()), tiny_llm, background=True)
        yield store
        assert store.flush(30) and not store.failures
        store.close()


class TestCacheGenRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _shared(self, tiny_llm: Any) -> None:
        store = InMemoryVectorStore(VectorStoreIntegrationTests.get_embeddings())
        store.add_documents([Document(page_content=f"passage number {n}") for n in range(6)])
        type(self).parts = {"retriever": store.as_retriever(), "cache": tiny_llm}

    parts: dict[str, Any]

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return CacheGenRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return self.parts

    @property
    def retriever_query_example(self) -> str:
        return "passage"
