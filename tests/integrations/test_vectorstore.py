"""KV follows the documents of a vector store: by content, never by id, and never at the expense of indexing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conftest import TEXTS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cachegen_rag.errors import ConfigError, StoreUnavailableError
from cachegen_rag.integrations.langchain import KVCachedVectorStore
from cachegen_rag.integrations.langchain.references import References, text_key


def wrapped() -> InMemoryVectorStore:
    return InMemoryVectorStore(DeterministicFakeEmbedding(size=8))


@pytest.fixture
def store(tiny_llm: Any) -> Any:
    opened = KVCachedVectorStore(wrapped(), tiny_llm)
    yield opened
    opened.close()


def documents(*numbers: int, source: str = "s") -> list[Document]:
    return [Document(page_content=TEXTS[n], metadata={"source": source}) for n in numbers]


def held(store: Any) -> list[int]:
    return [n for n, text in enumerate(TEXTS) if store.cache.contains(text)]


def test_adding_computes_and_deleting_drops(store: Any) -> None:
    ids = store.add_documents(documents(0, 1))
    assert held(store) == [0, 1]
    store.delete([ids[0]])
    assert held(store) == [1]
    assert store.add_texts([TEXTS[2]], [{"a": 1}], ids=["mine"]) == ["mine"]
    assert held(store) == [1, 2] and store.get_by_ids(["mine"])[0].metadata == {"a": 1}


async def test_async_does_the_same(store: Any) -> None:
    ids = await store.aadd_documents(documents(0, 1))
    await store.aadd_texts([TEXTS[2]])
    assert held(store) == [0, 1, 2]
    await store.adelete([ids[1]])
    assert held(store) == [0, 2]


def test_a_text_lives_as_long_as_its_last_document(store: Any) -> None:
    store.add_documents(documents(0), ids=["a"])
    store.add_documents(documents(0, source="other"), ids=["b"])
    store.delete(["a"])
    assert held(store) == [0]
    store.delete(["b"])
    assert held(store) == []


def test_an_id_that_gets_another_text(store: Any) -> None:
    store.add_documents(documents(0), ids=["a"])
    store.add_documents(documents(1), ids=["a"])
    assert held(store) == [1]


def test_changed_metadata_costs_nothing(store: Any) -> None:
    store.add_documents(documents(0), ids=["a"])
    calls: list[tuple[int, ...]] = []
    store._progress = lambda *args: calls.append(args)
    store.add_documents(documents(0, source="edited"), ids=["b"])
    assert calls[-1][2] == 0, "no token was computed"


@pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
def test_index_in_every_mode(store: Any, cleanup: Any) -> None:
    manager = InMemoryRecordManager("test")
    manager.create_schema()

    def run(docs: list[Document]) -> Any:
        return index(docs, manager, store, cleanup=cleanup, source_id_key="source", key_encoder="sha256")

    assert run(documents(0, 1, 2))["num_added"] == 3
    assert held(store) == [0, 1, 2]
    assert run(documents(0, 1, 2))["num_skipped"] == 3
    run(documents(1, 2, 3))
    assert held(store) == ([0, 1, 2, 3] if cleanup is None else [1, 2, 3])
    edited = documents(1, source="s")
    edited[0].metadata["page"] = 7  # another id for LangChain, the same KV for us
    run([*edited, *documents(2, 3)])
    assert held(store) == ([0, 1, 2, 3] if cleanup is None else [1, 2, 3])


def test_indexing_never_fails_because_of_kv(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise StoreUnavailableError("the disk is on fire")

    monkeypatch.setattr(store.cache, "prefill", fails)
    monkeypatch.setattr(store.cache, "delete", fails)
    ids = store.add_documents(documents(0, 1))
    assert [reason for _, reason in store.failures] == ["the disk is on fire"] * 2
    store.delete(ids)
    assert store.get_by_ids(ids) == []


def test_a_document_without_kv_is_a_failure_not_an_error(store: Any) -> None:
    store.add_documents([Document(page_content=""), Document(page_content="river " * 3000), *documents(0)])
    assert len(store.failures) == 2 and held(store) == [0]


def test_in_the_background(tiny_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KVCachedVectorStore(wrapped(), tiny_llm, background=True)
    gate, prefill = threading.Event(), store.cache.prefill

    def slow(*args: Any) -> Any:
        gate.wait(10)
        return prefill(*args)

    monkeypatch.setattr(store.cache, "prefill", slow)
    store.add_documents(documents(0, 1))
    assert not store.flush(0.01) and held(store) == []
    gate.set()
    assert store.flush(30) and held(store) == [0, 1]
    store.close()


def test_searching_makes_texts_known(tiny_llm: Any) -> None:
    plain = wrapped()
    plain.add_documents(documents(0, 1))
    tiny_llm.prefill(TEXTS[:2])
    for text in TEXTS[:2]:
        tiny_llm.open_cache().known.discard(text)
    store = KVCachedVectorStore(plain, tiny_llm)
    (found,) = store.similarity_search(TEXTS[0], k=1)
    message = tiny_llm.invoke(f"Context: {found.page_content} Question?")
    assert message.usage_metadata["input_token_details"]["cache_read"] > 0


async def test_every_search_is_the_wrapped_store(store: Any) -> None:
    store.add_documents(documents(0, 1, 2))
    vector = store.embeddings.embed_query(TEXTS[1])
    first = [
        store.similarity_search(TEXTS[1], 1)[0],
        store.similarity_search_by_vector(vector, 1)[0],
        store.similarity_search_with_score(TEXTS[1], k=1)[0][0],
        store.max_marginal_relevance_search(TEXTS[1], 1)[0],
        store.max_marginal_relevance_search_by_vector(vector, k=1)[0],
        (await store.asimilarity_search(TEXTS[1], 1))[0],
        (await store.asimilarity_search_by_vector(vector, 1))[0],
        (await store.asimilarity_search_with_score(TEXTS[1], k=1))[0][0],
        (await store.amax_marginal_relevance_search(TEXTS[1], 1))[0],
        store.as_retriever(search_kwargs={"k": 1}).invoke(TEXTS[1])[0],
    ]
    assert {d.page_content for d in first} == {TEXTS[1]}
    assert store.dump == store.store.dump, "what only the wrapped store can do remains reachable"
    with pytest.raises(AttributeError):
        _ = store.nonsense
    with pytest.raises(ConfigError, match="KVCachedVectorStore"):
        KVCachedVectorStore.from_texts(["a"], store.embeddings)
    assert isinstance(store, VectorStore)


def test_references_outlive_the_process(tiny_llm: Any, tmp_path: Any) -> None:
    plain = wrapped()
    first = KVCachedVectorStore(plain, tiny_llm, references=tmp_path / "refs.sqlite")
    first.add_documents(documents(0, 1), ids=["a", "b"])
    first.close()
    second = KVCachedVectorStore(plain, tiny_llm, references=tmp_path / "refs.sqlite")
    second.delete(["a"])
    assert held(second) == [1]
    second.close()


def test_the_table_of_references(tmp_path: Any) -> None:
    table = References()
    assert table.assign([("1", "x"), ("2", "x"), ("3", "y")]) == set()
    assert (table.count("x"), sorted(table.ids())) == (2, ["1", "2", "3"])
    assert table.drop(["1", "missing"]) == set()
    assert table.assign([("2", "y")]) == {"x"}
    assert table.drop(["2", "3"]) == {"y"}
    assert text_key("a") == text_key("a") != text_key("b")
    (tmp_path / "no.sqlite").write_text("this is no database, whatever its name says")
    with pytest.raises(StoreUnavailableError, match=r"no\.sqlite"):
        References(tmp_path / "no.sqlite")
