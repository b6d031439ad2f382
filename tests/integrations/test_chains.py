"""The chains of LangChain's tutorials, unchanged but for the model: they hit, and they answer as without a cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools.retriever import create_retriever_tool
from real_documents import QUESTION, documents

from cachegen_rag.integrations.langchain import CacheGenRAGMiddleware, CacheGenRetriever, ChatCacheGen

pytestmark = pytest.mark.real

SYSTEM = "Use the given context to answer the question. Context:\n\n{context}"
PROMPT = ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", "{input}")])


class Fixed(BaseRetriever):
    """Returns the same documents for every query."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return documents()


def joined(found: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in found)


def spliced(cache: Any) -> Any:
    """The model with its cache."""
    return ChatCacheGen(kv_cache=cache, max_tokens=8)


def text(cache: Any) -> Any:
    """The same model, computing everything."""
    return ChatCacheGen(kv_cache=cache, max_tokens=8, splice=False)


class Watch:
    """Requests that a cache has answered since."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._before = cache, cache.stats()

    @property
    def hits(self) -> int:
        return int(self._cache.stats().hits - self._before.hits)


def stuff(llm: Any) -> str:
    return str(create_stuff_documents_chain(llm, PROMPT).invoke({"context": documents(), "input": QUESTION}))


def retrieval(llm: Any) -> str:
    chain = create_retrieval_chain(Fixed(), create_stuff_documents_chain(llm, PROMPT))
    result = chain.invoke({"input": QUESTION})
    assert len(result["context"]) == len(documents())
    return str(result["answer"])


def pipe(llm: Any) -> str:
    chain = {"context": Fixed() | joined, "input": RunnablePassthrough()} | PROMPT | llm | StrOutputParser()
    return str(chain.invoke(QUESTION))


def streamed(llm: Any) -> str:
    chain = {"context": Fixed() | joined, "input": RunnablePassthrough()} | PROMPT | llm | StrOutputParser()
    return "".join(chain.stream(QUESTION))


def batch(llm: Any) -> str:
    chain = {"context": Fixed() | joined, "input": RunnablePassthrough()} | PROMPT | llm | StrOutputParser()
    first, second = chain.batch([QUESTION, QUESTION])
    assert first == second
    return str(first)


def in_async(llm: Any) -> str:
    chain = {"context": Fixed() | joined, "input": RunnablePassthrough()} | PROMPT | llm | StrOutputParser()
    return str(asyncio.run(chain.ainvoke(QUESTION)))


CHAINS = [stuff, retrieval, pipe, streamed, batch, in_async]


@pytest.fixture(scope="module")
def text_answer(real_cache: Any) -> str:
    """What the model answers when everything is computed; the prompts of all chains are the same."""
    return pipe(text(real_cache))


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_changes_by_one_line(chain: Any, real_cache: Any, text_answer: str) -> None:
    watch = Watch(real_cache)
    assert chain(spliced(real_cache)) == text_answer
    assert watch.hits == len(documents()) * (2 if chain is batch else 1)


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
def test_an_agent_with_a_retriever_tool(real_cache: Any, response_format: Any) -> None:
    tool = create_retriever_tool(Fixed(), "search", "Search the guide of lighthouses.", response_format=response_format)
    called = {"name": "search", "args": {"query": "lighthouse"}, "id": "1"}
    result = tool.invoke({**called, "type": "tool_call"})
    watch = Watch(real_cache)
    answers = []
    for model in (spliced(real_cache), text(real_cache)):
        history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[called]), result]
        answers.append(model.bind_tools([tool]).invoke(history).content)
    assert isinstance(result, ToolMessage)
    assert answers[0] == answers[1]
    assert watch.hits == len(documents())


def test_an_agent_runs(real_cache: Any) -> None:
    tool = create_retriever_tool(
        Fixed(), "search", "Search the guide of lighthouses.", response_format="content_and_artifact"
    )
    agent = create_agent(spliced(real_cache), [tool])
    out = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert isinstance(out["messages"][-1], AIMessage)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_middleware_gives_an_agent_its_documents(real_cache: Any, asynchronous: bool) -> None:
    agent = create_agent(spliced(real_cache), [], middleware=[CacheGenRAGMiddleware(Fixed(), k=2)])
    question = {"messages": [{"role": "user", "content": QUESTION}]}
    out = asyncio.run(agent.ainvoke(question)) if asynchronous else agent.invoke(question)
    record = out["messages"][-1].response_metadata["cachegen"]
    assert [s["source"] for s in record["segments"] if s["kind"] == "document"] == ["store", "store"]


def test_a_wrapped_retriever_makes_texts_known(real_engine: Any, real_cache: Any) -> None:
    from cachegen_rag import KVCache

    fresh = KVCache(real_engine, real_cache.store)  # as after a restart: the store is full, no text is known
    chain = create_stuff_documents_chain(ChatCacheGen(kv_cache=fresh, max_tokens=2), PROMPT)
    chain.invoke({"context": documents(), "input": QUESTION})
    assert fresh.stats().hits == 0
    found = CacheGenRetriever(retriever=Fixed(), cache=fresh).invoke(QUESTION)
    chain.invoke({"context": found, "input": QUESTION})
    assert fresh.stats().hits == len(documents())
