"""Chat models over shared engines: the real small model once a run, the tiny one once a run; no network."""

from __future__ import annotations

from typing import Any

import pytest
from real_documents import documents

from cachegen_rag import KVCache, Profile
from cachegen_rag.integrations.langchain import ChatCacheGen
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.stores.memory import MemoryStore

WORDS = "river city king science stone name where what the a of and document question answer passage cache key".split()
TEXTS = [" ".join(WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(60)) for i in range(6)]


@pytest.fixture(autouse=True)
def _no_network() -> Any:
    """As ``--disable-socket --allow-unix-socket --allow-hosts=127.0.0.1`` would."""
    pytest_socket = pytest.importorskip("pytest_socket")
    pytest_socket.socket_allow_hosts(["127.0.0.1", "::1"], allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()
    pytest_socket._remove_restrictions()


@pytest.fixture(scope="session")
def real_engine(real_gguf: Any) -> Any:
    """The real small model, 2,048 tokens of context."""
    model = LlamaCppModel(real_gguf, n_ctx=2048, n_threads=1)
    yield model
    model.close()


@pytest.fixture(scope="session")
def real_cache(real_engine: Any) -> Any:
    """A cache over the real model that holds the documents of ``real_documents``."""
    with KVCache(real_engine, MemoryStore()) as cache:
        cache.prefill(documents())
        yield cache


@pytest.fixture(scope="session")
def tiny_profile(tiny_model: Any) -> Profile:
    from cachegen_rag import calibrate

    return calibrate(tiny_model, TEXTS * 3)


@pytest.fixture
def tiny_llm(tiny_model: Any, tiny_profile: Profile) -> Any:
    """A chat model over the tiny engine, with an empty store in memory."""
    llm = ChatCacheGen(model=tiny_model, store=MemoryStore(), profile=tiny_profile, max_tokens=8)
    yield llm
    llm.close()
