"""LangChain's own suites for chat models, against the real small model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from real_documents import QUESTION, documents

from cachegen_rag.integrations.langchain import ChatCacheGen

LONG = ("structured", "json_mode", "tool_call", "tool_choice", "bind_runnables", "few_shot")
"""Tests whose answer is an object: it has to fit."""
DECLINES = "SmolLM2-135M was not trained on tool calls: left to choose, it answers in prose"


class TestChatCacheGenUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCacheGen

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "model.gguf", "store": "memory://"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"CACHEGEN_RAG_STORE__TOKEN": "secret"}, {"model": "model.gguf"}, {"store_token": "secret"}


@pytest.mark.real
class TestChatCacheGen(ChatModelIntegrationTests):
    cache: Any = None

    @pytest.fixture(autouse=True)
    def _shared_cache(self, real_cache: Any) -> None:
        type(self).cache = real_cache

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCacheGen

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"kv_cache": self.cache, "max_tokens": 4}

    @pytest.fixture
    def model(self, request: Any, _shared_cache: None) -> BaseChatModel:
        extra = dict(getattr(request, "param", None) or {})
        if any(part in request.node.name for part in LONG):
            extra["max_tokens"] = 80
        if any(part in request.node.name for part in ("structured", "json_mode")):
            extra["repeat_penalty"] = 1.3  # without, this model's joke repeats itself until the end
        return ChatCacheGen(**{**self.standard_chat_model_params, **self.chat_model_params, **extra})

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        llm = ChatCacheGen(**self.chat_model_params)
        if not stream:
            return llm.invoke(QUESTION, documents=documents())
        chunks = list(llm.stream(QUESTION, documents=documents()))
        message = chunks[0]
        for chunk in chunks[1:]:
            message += chunk
        assert message.usage_metadata is not None and message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    @pytest.mark.xfail(reason=DECLINES)
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
