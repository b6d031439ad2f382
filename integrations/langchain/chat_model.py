"""ChatCacheGen: a chat model in this process, whose documents are spliced instead of computed.

from cachegen_rag.integrations.langchain import ChatCacheGen

llm = ChatCacheGen(model="model.gguf", store="kv-cache")
llm.prefill(documents)                      # once; also what makes an unchanged chain hit
chain = create_stuff_documents_chain(llm, prompt)
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from langchain_core import exceptions as lc_exceptions
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.callbacks.manager import (
    AsyncRunManager,
    RunManager,
    adispatch_custom_event,
    ahandle_event,
    dispatch_custom_event,
    handle_event,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils import secret_from_env
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator

from cachegen_rag.cache import KVCache, PrefillReport
from cachegen_rag.config import ENV_PREFIX, check_shown_url, expect, load_settings
from cachegen_rag.errors import ConfigError, ContextOverflowError
from cachegen_rag.integrations.langchain import grammar as grammars
from cachegen_rag.integrations.langchain.messages import convert
from cachegen_rag.integrations.langchain.worker import Cancelled, Worker, worker_of
from cachegen_rag.metrics import RequestRecord
from cachegen_rag.models.base import Sampling, Token
from cachegen_rag.results import Stream

log = logging.getLogger(__name__)

TOKEN_ENV = f"{ENV_PREFIX}STORE__TOKEN"
REQUEST_EVENT = "cachegen_request"
"""Name of the custom event that carries a request's record to callbacks and ``astream_events``."""
NOT_FOR_A_LOCAL_MODEL = ("api_key", "base_url", "max_retries")
"""Standard constructor arguments that have no meaning here; accepted and dropped."""

_LCOverflow: type[Exception] = getattr(lc_exceptions, "ContextOverflowError", ValueError)


class PromptTooLongError(ContextOverflowError, _LCOverflow):  # type: ignore[misc,valid-type]
    """Our ContextOverflowError, caught by LangChain's fallbacks as well."""


class ChatCacheGen(BaseChatModel):
    """A local chat model that splices the KV of documents which were prefilled, and computes the rest.

    ``model`` is a GGUF file (llama.cpp) or any KVModel, such as a ``TransformersModel``; ``store`` a Store or a URL.
    Both may come from the environment (``CACHEGEN_RAG_MODEL__PATH``, ``CACHEGEN_RAG_STORE__URL``, ...) instead, and
    ``kv_cache`` takes a KVCache that exists. Nothing is loaded before the first request.

    One instance serves any number of threads and tasks: requests run in the order they came. ``timeout`` (seconds)
    bounds the whole answer, waiting included. What happened to each piece of the prompt is in
    ``response_metadata["cachegen"]`` of every answer, and in the custom event ``cachegen_request``.
    """

    model: Any = Field(default=None, alias="model_path")
    store: Any = None
    kv_cache: KVCache | None = Field(default=None, exclude=True)
    store_token: SecretStr | None = Field(default_factory=secret_from_env(TOKEN_ENV, default=None))
    salt: SecretStr | None = None
    profile: Any = None
    level: int | None = None
    levels: Sequence[int] | None = None
    recompute: int | None = None
    slo: float | None = None
    max_document_tokens: int | None = None
    splice: bool = True
    store_missed: bool | None = None
    n_ctx: int | None = None
    n_batch: int | None = None
    n_threads: int | None = None

    temperature: float = 0.0
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    logprobs: bool = False
    top_logprobs: int | None = None
    timeout: float | None = None
    streaming: bool = False
    on_request: Callable[[RequestRecord], None] | None = Field(default=None, exclude=True, repr=False)

    _opened: KVCache | None = PrivateAttr(default=None)
    _opening: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _worker: Worker = PrivateAttr(default_factory=Worker)

    model_config = ConfigDict(
        populate_by_name=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_remote_arguments(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = {key: value for key, value in values.items() if key not in NOT_FOR_A_LOCAL_MODEL}
        return values

    @field_validator("store")
    @classmethod
    def _no_secrets_in_the_url(cls, value: Any) -> Any:
        return check_shown_url(value) if isinstance(value, str) else value

    # ---- the cache behind it ----

    def open_cache(self) -> KVCache:
        """The KVCache that answers: ``kv_cache`` if it was given, else one that is opened on first use."""
        with self._opening:
            if self._opened is None:
                self._opened = self.kv_cache if self.kv_cache is not None else self._open()
            return self._opened

    def _open(self) -> KVCache:
        from cachegen_rag.opening import open_model, open_settings_store

        given = {"n_ctx": self.n_ctx, "n_batch": self.n_batch, "n_threads": self.n_threads}
        sections: dict[str, Any] = {"model": {k: v for k, v in given.items() if v is not None}, "store": {}}
        if isinstance(self.model, (str, Path)):
            sections["model"]["path"] = self.model
        if isinstance(self.store, (str, Path)):
            sections["store"]["url"] = str(self.store)
        if self.store_token is not None:
            sections["store"]["token"] = self.store_token
        settings = load_settings(**sections)
        model = (
            self.model if self.model is not None and not isinstance(self.model, (str, Path)) else open_model(settings)
        )
        store = self.store if self.store is not None and not isinstance(self.store, (str, Path)) else None
        salt = self.salt or settings.store.salt
        return KVCache(
            model,
            store if store is not None else open_settings_store(settings),
            profile=self.profile if self.profile is not None else settings.codec.profile,
            level=self.level if self.level is not None else settings.codec.level,
            levels=self.levels,
            max_document_tokens=self.max_document_tokens,
            salt=salt.get_secret_value() if salt is not None else "",
            splice=self.splice,
            store_missed=self.store_missed if self.store_missed is not None else settings.store_missed,
            shadow_fraction=settings.shadow_fraction,
            on_request=self.on_request,
            recompute=self.recompute if self.recompute is not None else settings.recompute,
            slo=self.slo if self.slo is not None else settings.stream.slo,
        )

    def prefill(self, documents: Iterable[Any], progress: Any = None) -> PrefillReport:
        """Compute and store the KV of documents (texts or LangChain Documents) that are not stored yet."""
        return self.open_cache().prefill(documents, progress)

    def close(self) -> None:
        """Free the model and close the store, unless they were given from outside. Idempotent."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None and opened is not self.kv_cache:
            opened.close()
            if opened.model is not self.model:
                opened.model.close()

    # ---- identity, for tracing ----

    @property
    def _llm_type(self) -> str:
        return "cachegen"

    @property
    def model_name(self) -> str:
        """The model's name, without loading it."""
        model = self.kv_cache.model if self.kv_cache is not None else self.model
        if isinstance(model, (str, Path)):
            return Path(model).stem
        return str(getattr(model, "name", None) or "default")

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = (
            "temperature",
            "max_tokens",
            "stop",
            "seed",
            "top_k",
            "top_p",
            "min_p",
            "repeat_penalty",
            "level",
            "splice",
        )
        return {"model_name": self.model_name, **{name: getattr(self, name) for name in names}}

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Constructor arguments that are secrets, and the environment variables they come from."""
        return {"store_token": TOKEN_ENV, "salt": f"{ENV_PREFIX}STORE__SALT"}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(
            ls_provider="cachegen",
            ls_model_name=str(kwargs.get("model") or self.model_name),
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
            ls_stop=stop if stop is not None else self.stop,
        )

    # ---- answering ----

    def _sampling(self, stop: list[str] | None, kwargs: dict[str, Any], grammar: str | None) -> Sampling:
        """Sampling of one request: call arguments win over the instance's. Takes what it knows out of ``kwargs``."""
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty",
                 "presence_penalty", "repeat_last_n", "seed")  # fmt: skip
        values = {name: kwargs.pop(name, None) for name in names}
        values = {name: getattr(self, name) if value is None else value for name, value in values.items()}
        asked = kwargs.pop("logprobs", None)
        asked = self.logprobs if asked is None else asked
        top = kwargs.pop("top_logprobs", None)
        top = self.top_logprobs if top is None else top
        expect("top_logprobs", top, (int, type(None)), "a whole number or None")
        stops = stop if stop is not None else self.stop
        expect("stop", stops, (str, list, tuple, type(None)), "a list of texts")
        return Sampling(
            **values,
            stop=(stops,) if isinstance(stops, str) else tuple(stops or ()),
            grammar=grammar,
            logprobs=max(1, top or 0) if asked or top else None,
        )

    def _answer(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        whole: bool,
        cancelled: Cancelled,
    ) -> Iterator[ChatGenerationChunk | None]:
        """The chunks of one answer. Runs on the worker thread: the model loads here if it has to.

        ``whole``: tool calls come when they are complete, so that one that was cut off is none.
        """
        kwargs = {key: value for key, value in kwargs.items() if key not in ("model", "stream_usage", "strict")}
        documents = kwargs.pop("documents", None)
        form = grammars.answer_form(**{k: kwargs.pop(k) for k in FORM_ARGUMENTS if k in kwargs})
        sampling = self._sampling(stop, kwargs, form.grammar)
        spliced = kwargs.pop("spliced", self.splice)
        if kwargs:
            raise ConfigError(f"unknown arguments of a request: {', '.join(sorted(kwargs))}")
        cache = self.open_cache()
        turns = convert(messages, documents, cache.known, cache.contains, form.instructions)
        try:
            with cache.stream(cache.prompt(turns), sampling, spliced=spliced, cancelled=cancelled) as stream:
                yield from self._chunks(stream, form, sampling, whole)
        except ContextOverflowError as error:
            raise PromptTooLongError(str(error)) from error

    def _chunks(
        self, stream: Stream, form: grammars.Form, sampling: Sampling, whole: bool
    ) -> Iterator[ChatGenerationChunk | None]:
        text = ""
        held = form.calls  # an answer that may be a call is held back until its first characters show what it is
        growing = grammars.CallStream()
        tokens: list[Token] = []
        for token in stream:
            text += token.text
            tokens.append(token)
            if held and text and not grammars.OPEN.startswith(text[: len(grammars.OPEN)]):
                held = False
            if held:
                pieces = [] if whole else [tool_call_chunk(**piece) for piece in growing.push(token.text)]
                yield self._chunk("", tokens, sampling, pieces) if pieces else None
                tokens = [] if pieces else tokens
            elif text:
                yield self._chunk(text, tokens, sampling)
                text, tokens = "", []
            else:
                yield None
        unfinished = list(growing.finish())
        calls = unfinished or (grammars.parse_calls(text) if held and not growing.calls else [])
        record: RequestRecord = stream.record
        called = bool(calls or growing.calls)
        finish = "tool_calls" if called and not unfinished else record.finish_reason or "stop"
        message = AIMessageChunk(
            content="" if called else text,
            tool_call_chunks=[tool_call_chunk(**call) for call in calls],
            usage_metadata=usage(record),
            response_metadata={
                "model_name": record.model or self.model_name,
                "model_provider": "cachegen",
                "finish_reason": finish,
                "cachegen": summary(record),
                **self._logprobs(tokens, sampling),
            },
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=message, generation_info={"finish_reason": finish})

    def _chunk(
        self, text: str, tokens: list[Token], sampling: Sampling, calls: Sequence[ToolCallChunk] = ()
    ) -> ChatGenerationChunk:
        metadata = self._logprobs(tokens, sampling)
        return ChatGenerationChunk(
            message=AIMessageChunk(content=text, tool_call_chunks=list(calls), response_metadata=metadata)
        )

    def _logprobs(self, tokens: list[Token], sampling: Sampling) -> dict[str, Any]:
        """Log probabilities in the shape of OpenAI's, where they were asked for."""
        if sampling.logprobs is None or not tokens:
            return {}
        word = self.open_cache().model.detokenize
        content = [
            {
                "token": word([token.id]),
                "logprob": token.logprob,
                "top_logprobs": [{"token": word([i]), "logprob": p} for i, p in token.top_logprobs],
            }
            for token in tokens
            if token.logprob is not None
        ]
        return {"logprobs": {"content": content}}

    def _run(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], *, whole: bool = False
    ) -> Any:
        """What the worker is asked to do, and how long it may take."""
        timeout = kwargs.pop("timeout", None)
        timeout = self.timeout if timeout is None else timeout
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, (int, float))
            or not 0 < timeout <= threading.TIMEOUT_MAX
        ):
            raise ConfigError(f"timeout = {timeout!r:.80}: must be a number of seconds above 0")
        return (lambda cancelled: self._answer(messages, stop, kwargs, whole, cancelled)), timeout

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with contextlib.closing(self._queue().stream(*self._run(messages, stop, kwargs))) as chunks:
            for chunk in chunks:
                if run_manager is not None:
                    run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                _tell(run_manager, chunk.message)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with contextlib.aclosing(self._queue().astream(*self._run(messages, stop, kwargs))) as chunks:
            async for chunk in chunks:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                await _atell(run_manager, chunk.message)
                yield chunk

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with contextlib.closing(self._queue().stream(*self._run(messages, stop, kwargs, whole=True))) as chunks:
            result = _result(generate_from_stream(chunks))
        _tell(run_manager, result.generations[0].message)
        return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with contextlib.aclosing(self._queue().astream(*self._run(messages, stop, kwargs, whole=True))) as chunks:
            result = _result(generate_from_stream(iter([chunk async for chunk in chunks])))
        await _atell(run_manager, result.generations[0].message)
        return result

    def _queue(self) -> Worker:
        """Where requests wait: with the engine where that was given, else with this instance, which opens its own."""
        engine = self.kv_cache.model if self.kv_cache is not None else self.model
        return self._worker if engine is None or isinstance(engine, (str, Path)) else worker_of(engine)

    # ---- tools and structured output ----

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools. Its calls are valid by grammar, whatever the model's size.

        ``tool_choice``: ``"any"`` (or ``"required"``, True) forces a call, a tool's name forces that tool, ``"none"``
        forbids calls, None or ``"auto"`` lets the model choose between a call and text.
        """
        expect("tools", tools, Sequence, "a list of tools")
        try:
            made = [convert_to_openai_tool(tool) for tool in tools]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"this is no tool: {error}") from error
        names = [tool["function"]["name"] for tool in made]
        if isinstance(tool_choice, str) and tool_choice not in ("any", "auto", "none", "required", *names):
            raise ConfigError(f"tool_choice {tool_choice!r} names none of the tools {', '.join(names)}")
        return self.bind(tools=made, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that fit ``schema`` (a pydantic class, a TypedDict or a JSON schema), by grammar in every method."""
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if method not in ("json_schema", "json_mode"):
            raise ConfigError(f"method = {method!r}: must be json_schema, function_calling or json_mode")
        if kwargs:
            raise ConfigError(f"unknown arguments of with_structured_output: {', '.join(sorted(kwargs))}")
        try:
            json_schema = convert_to_json_schema(schema)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"this is no schema: {error}") from error
        llm = self.bind(
            response_format={"type": "json_schema", "json_schema": {"schema": json_schema}},
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        )
        parser: Runnable[Any, Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return llm | parser
        parsed = RunnablePassthrough.assign(
            parsed=RunnableLambda(lambda out: out["raw"]) | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


EVENT = ("on_custom_event", "ignore_custom_event", REQUEST_EVENT)
FORM_ARGUMENTS = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "grammar")


def usage(record: RequestRecord) -> UsageMetadata:
    """Token counts: ``cache_read`` were spliced, ``cache_creation`` missed, and are stored after the answer."""
    return UsageMetadata(
        input_tokens=record.prompt_tokens,
        output_tokens=record.completion_tokens,
        total_tokens=record.prompt_tokens + record.completion_tokens,
        input_token_details={"cache_read": record.spliced_tokens, "cache_creation": record.stored_tokens},
    )


def summary(record: RequestRecord) -> dict[str, Any]:
    """The record of a request, JSON-ready: what ``response_metadata["cachegen"]`` holds."""
    return record.as_dict()


def _tell(run: RunManager | None, message: BaseMessage) -> None:
    """Send the request's record, if ``message`` has it, to the callbacks as a custom event.

    LangChain keeps the run from a model that streams: the event is then the one's of the chain around it, if any.
    """
    if record := message.response_metadata.get("cachegen"):
        if run is not None:
            handle_event(run.handlers, *EVENT, record, run_id=run.run_id, tags=run.tags, metadata=run.metadata)
            return
        with contextlib.suppress(RuntimeError):  # there is no chain
            dispatch_custom_event(REQUEST_EVENT, record)


async def _atell(run: AsyncRunManager | None, message: BaseMessage) -> None:
    if record := message.response_metadata.get("cachegen"):
        if run is not None:
            await ahandle_event(run.handlers, *EVENT, record, run_id=run.run_id, tags=run.tags, metadata=run.metadata)
            return
        with contextlib.suppress(RuntimeError):
            await adispatch_custom_event(REQUEST_EVENT, record)


def _result(result: ChatResult) -> ChatResult:
    """Give the usage to ``llm_output`` as well, where older callbacks look for it."""
    message = result.generations[0].message
    if isinstance(message, AIMessage) and message.usage_metadata is not None:
        result.llm_output = {
            "model_name": message.response_metadata.get("model_name"),
            "token_usage": {
                "prompt_tokens": message.usage_metadata["input_tokens"],
                "completion_tokens": message.usage_metadata["output_tokens"],
                "total_tokens": message.usage_metadata["total_tokens"],
            },
        }
    return result
