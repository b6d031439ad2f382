"""ChatCacheGen over the transformers engine: the same model file, the same prompts, the same store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TEXTS

from cachegen_rag.integrations.langchain import ChatCacheGen
from cachegen_rag.stores.memory import MemoryStore

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def torch_model(tiny_gguf: Path) -> Any:
    from cachegen_rag.models.transformers import TransformersModel

    model = TransformersModel(tiny_gguf, n_ctx=1024)
    yield model
    model.close()


async def test_documents_are_spliced(torch_model: Any, tiny_profile: Any) -> None:
    llm = ChatCacheGen(model=torch_model, store=MemoryStore(), profile=tiny_profile, max_tokens=4)
    assert llm.prefill(TEXTS[:2]).computed == 2
    message = await llm.ainvoke("Which?", documents=TEXTS[:2])
    assert message.usage_metadata["input_token_details"]["cache_read"] > 0
    text = llm.invoke("Which?", documents=TEXTS[:2], spliced=False)
    assert text.usage_metadata["input_tokens"] == message.usage_metadata["input_tokens"]
    assert len(list(llm.stream("Which?"))) > 1


def test_one_engine_reads_what_the_other_stored(torch_model: Any, tiny_model: Any, tiny_profile: Any) -> None:
    if torch_model.fingerprint.digest() != tiny_model.fingerprint.digest():
        pytest.skip("the engines' fingerprints differ, so they do not share KV")
    store = MemoryStore()
    ChatCacheGen(model=tiny_model, store=store, profile=tiny_profile).prefill(TEXTS[:1])
    llm = ChatCacheGen(model=torch_model, store=store, profile=tiny_profile, max_tokens=2)
    assert llm.invoke("Which?", documents=TEXTS[:1]).usage_metadata["input_token_details"]["cache_read"] > 0
