"""ChatCacheGen on the tiny model: what callers rely on, many callers at once, and callers that leave."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import TEXTS
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError as LangChainOverflow
from langchain_core.load import dumps
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, ValidationError

from cachegen_rag.errors import ConfigError, ContextOverflowError, ModelLoadError
from cachegen_rag.integrations.langchain import ChatCacheGen
from cachegen_rag.models.llama_session import LlamaSession
from cachegen_rag.stores.memory import MemoryStore

CANARY = "canary-91c4"


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return total


def record(message: Any) -> dict[str, Any]:
    return dict(message.response_metadata["cachegen"])


def sources(message: Any) -> list[str]:
    return [s["source"] for s in record(message)["segments"] if s["kind"] == "document"]


# ---- documents ----


def test_documents_are_spliced_by_every_way(tiny_llm: Any) -> None:
    assert tiny_llm.prefill(TEXTS[:2]).computed == 2
    beside = tiny_llm.invoke("Which?", documents=TEXTS[:2])
    bound = tiny_llm.bind(documents=TEXTS[:2]).invoke("Which?")
    inside = tiny_llm.invoke(f"Context:\n\n{TEXTS[0]}\n\n{TEXTS[1]}\n\nWhich?")
    blocks = tiny_llm.invoke([HumanMessage([{"type": "text", "text": t} for t in (*TEXTS[:2], "Which?")])])
    for message in (beside, bound, inside, blocks):
        assert sources(message) == ["store", "store"]
        details = message.usage_metadata["input_token_details"]
        assert details["cache_read"] == record(message)["spliced_tokens"] > 0
    assert beside.content == bound.content


def test_the_prompt_is_the_same_with_and_without_the_cache(tiny_llm: Any) -> None:
    tiny_llm.prefill(TEXTS[:2])
    prompt = f"Context:\n\n{TEXTS[0]}\n\n{TEXTS[1]}\n\nWhich?"
    spliced, text = tiny_llm.invoke(prompt), tiny_llm.invoke(prompt, spliced=False)
    assert spliced.usage_metadata["input_tokens"] == text.usage_metadata["input_tokens"]
    assert sources(text) == ["text", "text"]


def test_an_unknown_document_is_computed_and_stored(tiny_llm: Any) -> None:
    tiny_llm.prefill(TEXTS[:1])
    message = tiny_llm.invoke("Which?", documents=TEXTS[:2])
    assert sources(message) == ["store", "text"]
    missed = record(message)["segments"][3]
    assert missed["reason"]
    assert message.usage_metadata["input_token_details"]["cache_creation"] == missed["tokens"]
    assert tiny_llm.open_cache().idle.flush(30)
    again = tiny_llm.invoke("Which?", documents=TEXTS[:2])
    assert sources(again) == ["store", "store"]
    assert again.usage_metadata["input_token_details"]["cache_creation"] == 0


def test_storing_what_was_missed_can_be_switched_off(tiny_model: Any, tiny_profile: Any) -> None:
    llm = ChatCacheGen(model=tiny_model, store=MemoryStore(), profile=tiny_profile, max_tokens=2, store_missed=False)
    message = llm.invoke("Which?", documents=TEXTS[:1])
    assert message.usage_metadata["input_token_details"]["cache_creation"] == 0
    assert not llm.open_cache().contains(TEXTS[0])
    llm.close()


# ---- streams ----


def test_a_stream_adds_up_to_the_answer(tiny_llm: Any) -> None:
    chunks = list(tiny_llm.stream("name the river"))
    assert merged(chunks).content == tiny_llm.invoke("name the river").content
    assert [c.chunk_position for c in chunks].count("last") == 1 and chunks[-1].chunk_position == "last"
    assert sum(bool(c.usage_metadata) for c in chunks) == 1
    assert sum("model_name" in c.response_metadata for c in chunks) == 1
    assert chunks[-1].usage_metadata["output_tokens"] == 8
    assert record(merged(chunks))["ttft_ms"] > 0


async def test_async_gives_the_same(tiny_llm: Any) -> None:
    whole = await tiny_llm.ainvoke("name the river")
    chunks = [chunk async for chunk in tiny_llm.astream("name the river")]
    assert merged(chunks).content == whole.content == tiny_llm.invoke("name the river").content


def test_callbacks_see_every_token(tiny_llm: Any) -> None:
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []
            self.usage: Any = None

        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            self.tokens.append(token)

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.usage = response.generations[0][0].message.usage_metadata

    seen = Seen()
    chunks = list(tiny_llm.stream("name the river", config={"callbacks": [seen]}))
    assert "".join(seen.tokens) == merged(chunks).content
    assert seen.usage["output_tokens"] == 8


async def test_the_record_is_a_custom_event(tiny_llm: Any) -> None:
    class Seen(BaseCallbackHandler):
        events: ClassVar[list[tuple[str, Any, Any]]] = []

        def on_custom_event(self, name: str, data: Any, *, run_id: Any, **kwargs: Any) -> None:
            self.events.append((name, data, run_id))

    seen = Seen()
    config = {"callbacks": [seen]}
    chain = RunnableLambda(str) | tiny_llm
    list(chain.stream("name the river", config))
    tiny_llm.invoke("name the river", config)
    await tiny_llm.ainvoke("name the river", config)
    assert [chunk async for chunk in chain.astream("name the river", config)]
    assert [name for name, *_ in seen.events] == ["cachegen_request"] * 4
    assert all(data["completion_tokens"] == 8 for _, data, _ in seen.events)
    assert len({run for *_, run in seen.events}) == 4
    events = [e async for e in chain.astream_events("river", version="v2")]
    (event,) = [e for e in events if e["event"] == "on_custom_event"]
    assert event["name"] == "cachegen_request" and event["data"]["segments"]


def test_content_blocks(tiny_llm: Any) -> None:
    llm = tiny_llm.model_copy(update={"output_version": "v1"})
    assert [b["type"] for b in llm.invoke("name the river").content] == ["text"]


# ---- sampling ----


def test_stop_strings(tiny_llm: Any) -> None:
    whole = tiny_llm.invoke("name the river").content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    cut = whole[: whole.index(stop)]
    message = tiny_llm.invoke("name the river", stop=[stop])
    assert message.content == cut and message.response_metadata["finish_reason"] == "stop"
    assert merged(list(tiny_llm.stream("name the river", stop=[stop]))).content == cut
    assert tiny_llm.model_copy(update={"stop": [stop]}).invoke("name the river").content == cut
    assert tiny_llm.model_copy(update={"stop": [stop]}).invoke("name the river", stop=[]).content == whole


def test_seeds(tiny_llm: Any) -> None:
    def say(seed: int) -> str:
        return str(tiny_llm.invoke("name the river", temperature=2.0, seed=seed, max_tokens=16).content)

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(5)}) > 1


def test_logprobs(tiny_llm: Any) -> None:
    message = tiny_llm.invoke("name the river", top_logprobs=3)
    content = message.response_metadata["logprobs"]["content"]
    assert len(content) == 8
    assert all(len(t["top_logprobs"]) == 3 and t["logprob"] <= 0 for t in content)
    assert all(t["logprob"] == pytest.approx(t["top_logprobs"][0]["logprob"]) for t in content), (
        "greedy takes the likeliest"
    )
    streamed = merged(list(tiny_llm.stream("name the river", logprobs=True)))
    assert len(streamed.response_metadata["logprobs"]["content"]) == 8
    assert "logprobs" not in tiny_llm.invoke("name the river").response_metadata


def test_call_arguments_win(tiny_llm: Any) -> None:
    assert tiny_llm.invoke("hi", max_tokens=3).usage_metadata["output_tokens"] == 3
    assert tiny_llm.bind(max_tokens=2).invoke("hi").usage_metadata["output_tokens"] == 2
    assert tiny_llm.invoke("hi", max_tokens=3).response_metadata["finish_reason"] == "length"


# ---- grammar ----


class Pair(BaseModel):
    """Two things."""

    word: bool
    count: bool


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_even_a_random_model_answers_in_form(tiny_llm: Any, method: Any) -> None:
    llm = tiny_llm.model_copy(update={"max_tokens": 200})
    assert isinstance(llm.with_structured_output(Pair, method=method).invoke("go"), Pair)
    out = llm.with_structured_output(Pair, method=method, include_raw=True).invoke("go")
    assert isinstance(out["parsed"], Pair) and out["parsing_error"] is None
    schema = Pair.model_json_schema()
    assert set(llm.with_structured_output(schema, method=method).invoke("go")) == {"word", "count"}


def test_what_was_cut_off_is_a_parsing_error(tiny_llm: Any) -> None:
    out = tiny_llm.with_structured_output(Pair, include_raw=True).invoke("go", max_tokens=1)
    assert out["parsed"] is None and out["parsing_error"] is not None and out["raw"].response_metadata


def test_a_forced_tool_call(tiny_llm: Any) -> None:
    llm = tiny_llm.model_copy(update={"max_tokens": 200}).bind_tools([Pair], tool_choice="any")
    message = llm.invoke("go")
    assert [c["name"] for c in message.tool_calls] == ["Pair"] and set(message.tool_calls[0]["args"]) == {
        "word",
        "count",
    }
    assert message.response_metadata["finish_reason"] == "tool_calls" and message.content == ""
    assert merged(list(llm.stream("go"))).tool_calls[0]["args"] == message.tool_calls[0]["args"]


def test_a_tool_call_streams(tiny_llm: Any) -> None:
    llm = tiny_llm.model_copy(update={"max_tokens": 200}).bind_tools([Pair], tool_choice="any")
    chunks = list(llm.stream("go"))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert pieces[0]["name"] == "Pair" and pieces[0]["id"] and len(pieces) > 3
    assert sum(piece["name"] is not None for piece in pieces) == 1
    total = merged(chunks)
    assert total.tool_calls[0]["args"] == llm.invoke("go").tool_calls[0]["args"] and not total.invalid_tool_calls
    assert total.content == "" and total.response_metadata["finish_reason"] == "tool_calls"


def test_a_tool_call_that_was_cut_off_is_not_to_be_run(tiny_llm: Any) -> None:
    llm = tiny_llm.bind_tools([Pair], tool_choice="any")
    whole = llm.invoke("go", max_tokens=200)
    begun = 0
    for limit in range(1, whole.usage_metadata["output_tokens"], 3):
        total = merged(list(llm.stream("go", max_tokens=limit)))
        if total.tool_calls:  # only the brackets around it were cut off
            assert total.tool_calls[0]["args"] == whole.tool_calls[0]["args"]
            continue
        assert not llm.invoke("go", max_tokens=limit).tool_calls
        assert total.response_metadata["finish_reason"] == "length"
        begun += bool(total.invalid_tool_calls)
    assert begun > 1


def test_a_grammar_of_ones_own(tiny_llm: Any) -> None:
    assert tiny_llm.invoke("go", grammar='root ::= "yes" | "no"').content in ("yes", "no")


@pytest.mark.parametrize(
    "arguments",
    [{"tool_choice": "none of these"}, {"tool_choice": "Pears"}],
)
def test_tools_that_are_not_there(tiny_llm: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Pair"):
        tiny_llm.bind_tools([Pair], **arguments)
    for nonsense in (5, "Pair", {"a": 1}):
        with pytest.raises(ConfigError, match="tool"):
            tiny_llm.bind_tools([nonsense])
        with pytest.raises(ConfigError, match="schema"):
            tiny_llm.with_structured_output(nonsense)
    with pytest.raises(ConfigError, match="tools"):
        tiny_llm.bind_tools(Pair)
    with pytest.raises(ConfigError, match="method"):
        tiny_llm.with_structured_output(Pair, method="prayer")


# ---- identity, secrets, errors ----


def test_nothing_is_loaded_to_construct(tmp_path: Path) -> None:
    llm = ChatCacheGen(model_path=tmp_path / "none.gguf", store="memory://")
    assert llm.asdict()["model_name"] == "none" and llm._llm_type == "cachegen"
    assert llm.model == tmp_path / "none.gguf"
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        llm.invoke("hi")


def test_secrets_do_not_appear(tiny_model: Any, caplog: pytest.LogCaptureFixture, tiny_profile: Any) -> None:
    llm = ChatCacheGen(
        model=tiny_model, store=MemoryStore(), store_token=CANARY, salt=CANARY, profile=tiny_profile, max_tokens=2
    )
    with caplog.at_level("DEBUG"):
        shown = [
            repr(llm),
            str(llm),
            dumps(llm),
            json.dumps(llm.asdict(), default=str),
            llm.model_dump_json(exclude={"model", "store", "profile"}),
        ]
        shown.append(repr(llm.invoke("hi")))
    assert CANARY not in "".join([*shown, caplog.text])
    assert set(llm.lc_secrets) == {"store_token", "salt"}


@pytest.mark.parametrize(
    "fields",
    [
        {"store_tokn": CANARY},
        {"store_token": [CANARY]},
        {"salt": {CANARY: 1}},
        {"store": f"https://user:{CANARY}@host"},
        {"store": f"https://host?token={CANARY}"},
        {"store_token": CANARY, "temperature": "x"},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_secrets_in_wrong_fields_do_not_appear(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCacheGen(model_path="none.gguf", **fields)
    assert CANARY not in str(caught.value)


def test_tenants_are_apart(tiny_model: Any, tiny_profile: Any) -> None:
    store = MemoryStore()
    one = ChatCacheGen(model=tiny_model, store=store, salt="one", profile=tiny_profile, max_tokens=2)
    two = ChatCacheGen(model=tiny_model, store=store, salt="two", profile=tiny_profile, max_tokens=2)
    one.prefill(TEXTS[:1])
    assert sources(one.invoke("hi", documents=TEXTS[:1])) == ["store"]
    assert sources(two.invoke("hi", documents=TEXTS[:1])) == ["text"]


def test_a_prompt_that_does_not_fit(tiny_llm: Any) -> None:
    for kind in (ContextOverflowError, LangChainOverflow):
        with pytest.raises(kind, match="2048"):
            tiny_llm.invoke("river " * 3000)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temprature": 1}, {"documents": [3]}, {"response_format": {"type": "xml"}}, {"stop": 3}, {"stop": [3]},
        {"top_logprobs": "x"}, {"temperature": "hot"}, {"seed": 1.5}, {"tools": 5}, {"grammar": 5},
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_call(tiny_llm: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        tiny_llm.invoke("hi", **arguments)


def test_wrong_arguments_of_the_constructor() -> None:
    with pytest.raises(ValidationError, match="temprature"):
        ChatCacheGen(temprature=1)
    assert ChatCacheGen(api_key="x", max_retries=2, base_url="y").model is None


def test_settings_come_from_the_environment(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydantic_settings")
    monkeypatch.setenv("CACHEGEN_RAG_MODEL__PATH", str(tiny_gguf))
    monkeypatch.setenv("CACHEGEN_RAG_MODEL__N_THREADS", "1")
    monkeypatch.setenv("CACHEGEN_RAG_STORE__URL", "memory://")
    monkeypatch.setenv("CACHEGEN_RAG_STORE_MISSED", "false")
    llm = ChatCacheGen(max_tokens=2, n_ctx=512)
    assert llm.invoke("hi").response_metadata["model_name"]
    assert llm.open_cache().model.n_ctx == 512 and not llm.open_cache()._store_missed
    llm.close()
    llm.close()


# ---- many callers ----


async def test_32_requests_at_once(tiny_llm: Any) -> None:
    tiny_llm.prefill(TEXTS[:3])
    questions = [f"name number {n}" for n in range(32)]
    alone = [tiny_llm.invoke(q, documents=[TEXTS[n % 3]]).content for n, q in enumerate(questions)]
    finished: list[int] = []

    async def ask(n: int) -> Any:
        message = await tiny_llm.ainvoke(questions[n], documents=[TEXTS[n % 3]])
        finished.append(n)
        return message

    messages = await asyncio.gather(*(ask(n) for n in range(32)))
    assert [m.content for m in messages] == alone, "all correct"
    assert finished == list(range(32)), "none starved: first come, first served"
    assert all(sources(m) == ["store"] for m in messages)


async def test_tasks_and_threads_together(tiny_llm: Any) -> None:
    alone = {q: tiny_llm.invoke(q).content for q in ("river", "city", "king", "stone")}
    results: list[tuple[str, Any]] = []

    def thread(question: str) -> None:
        results.append((question, tiny_llm.invoke(question).content))

    threads = [threading.Thread(target=thread, args=(q,)) for q in alone] * 1
    for t in threads:
        t.start()
    streamed = await asyncio.gather(*(tiny_llm.ainvoke(q) for q in alone))
    for t in threads:
        await asyncio.to_thread(t.join)
    assert dict(results) == alone and [m.content for m in streamed] == list(alone.values())


async def test_two_instances_share_an_engine(tiny_model: Any, tiny_llm: Any) -> None:
    other = ChatCacheGen(model=tiny_model, store=MemoryStore(), max_tokens=8)
    alone = tiny_llm.invoke("river").content
    both = await asyncio.gather(*(llm.ainvoke("river") for llm in (tiny_llm, other) * 4))
    assert {m.content for m in both} == {alone}


@pytest.mark.parametrize("when", ["in the prompt", "in the answer"])
async def test_a_cancelled_request_frees_the_context_within_a_step(
    tiny_llm: Any, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is under way when the task is cancelled is the last one."""
    steps: list[int] = []  # tokens of each
    reached, cancelled = threading.Event(), threading.Event()
    decode = LlamaSession._decode_batch

    def counted(self: LlamaSession, ids: list[int], logits: bool) -> None:
        steps.append(len(ids))
        if len(ids) > 1 if when == "in the prompt" else steps.count(1) == 5:
            reached.set()
            assert cancelled.wait(10)
        decode(self, ids, logits)

    monkeypatch.setattr(LlamaSession, "_decode_batch", counted)
    task = asyncio.create_task(tiny_llm.ainvoke("name the river " * 300, max_tokens=1000))
    await asyncio.to_thread(reached.wait)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    before = len(steps)
    cancelled.set()
    with tiny_llm.open_cache().model.session():
        assert len(steps) == before


def test_a_stream_that_is_left_frees_the_context(tiny_llm: Any) -> None:
    stream = tiny_llm.stream("name the river", max_tokens=1500)
    next(stream)
    stream.close()
    assert tiny_llm.invoke("hi").usage_metadata["output_tokens"] == 8
    assert tiny_llm.open_cache().stats().requests == 2


async def test_a_deadline(tiny_llm: Any) -> None:
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        tiny_llm.invoke("river " * 500, max_tokens=1000, timeout=0.01)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        await tiny_llm.model_copy(update={"timeout": 0.01}).ainvoke("river " * 500, max_tokens=1000)
    assert tiny_llm.invoke("hi", timeout=60).content


@pytest.mark.parametrize("timeout", ["x", True, float("nan"), float("inf"), 0, -1, 1e300])
def test_a_timeout_is_a_number(tiny_llm: Any, timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        tiny_llm.invoke("hello", timeout=timeout)
