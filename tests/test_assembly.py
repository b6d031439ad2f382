"""Assembling a prompt: few engine calls, whatever is missing between what is spliced; every position accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cachegen_rag.cache import KVCache
from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.codec.profile import Profile
from cachegen_rag.recompute import CALLS, Heads, Method, Nothing, QueryAware, Recompute
from cachegen_rag.stores.memory import MemoryStore

TEXTS = [f"the {name} of the city and the river {name} in the {name} of the king is a stone" for name in "abcdefgh"]


@pytest.fixture(scope="module")
def profile(tiny_model: Any) -> Profile:
    return calibrate(tiny_model, ["the king of the river and the city " * 60])


@pytest.fixture
def calls(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every call of the engine."""
    made: list[int] = []
    decode = type(tiny_model.context)._decode

    def counted(context: Any, runs: Any) -> None:
        made.append(sum(len(ids) for _, _, ids in runs))
        decode(context, runs)

    monkeypatch.setattr(type(tiny_model.context), "_decode", counted)
    monkeypatch.setattr(tiny_model.kept, "restore", lambda *_: 0)  # what tests before this one have left
    return made


def opened(model: Any, profile: Profile, method: Method, budget: float) -> KVCache:
    recompute = Recompute(method, budget)
    return KVCache(model, MemoryStore(), profile=profile, recompute=recompute, exact_bytes=0, store_missed=False)


METHODS = [(Nothing(), 0.0, 0), (Heads(3), 1.0, 0), (QueryAware(), 0.15, 1), (QueryAware(heads=2), 0.3, 1)]


@pytest.mark.parametrize(("method", "budget", "looks"), METHODS, ids=lambda x: getattr(x, "name", str(x)))
def test_a_spliced_prompt_takes_few_calls_however_many_documents(
    tiny_model: Any, profile: Profile, calls: list[int], method: Method, budget: float, looks: int
) -> None:
    with opened(tiny_model, profile, method, budget) as cache:
        cache.prefill(TEXTS)
        prompt = cache.prompt([{"role": "user", "content": "what is the river?"}], TEXTS)
        calls.clear()
        stream = cache.stream(prompt)
        next(iter(stream))
        stream.close()
        record = stream.record
        assert len(calls) <= 2 + looks + CALLS  # what leads, the question, looking at it, the gaps between documents
        computed = len(prompt) - record.spliced_tokens
        assert sum(calls) == computed + looks * len(prompt.segments[-1])
        assert all(part.source == "store" for part in record.segments if part.kind == "document")
        inside = sum(len(prompt.segments[i]) for i in prompt.documents)
        assert record.recomputed_tokens + record.spliced_tokens == inside
        assert (record.recomputed_tokens > 0) == (budget > 0)


@pytest.mark.parametrize(("method", "budget", "looks"), METHODS, ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("stored", [[0, 2, 3], [1], [7], [0, 7], [1, 2, 4, 5, 6], []], ids=str)
def test_documents_that_are_missing_are_computed_in_their_place(
    tiny_model: Any, profile: Profile, method: Method, budget: float, looks: int, stored: list[int]
) -> None:
    with opened(tiny_model, profile, method, budget) as cache:
        cache.prefill([TEXTS[n] for n in stored])
        prompt = cache.prompt([{"role": "user", "content": "what is the river?"}], TEXTS)
        with cache.stream(prompt) as stream:
            next(iter(stream))
            record = stream.record
        sources = [part.source for part in record.segments if part.kind == "document"]
        assert sources == ["store" if n in stored else "text" for n in range(len(TEXTS))]
        missed = sum(len(prompt.segments[i]) for n, i in enumerate(prompt.documents) if n not in stored)
        inside = sum(len(prompt.segments[i]) for i in prompt.documents)
        assert record.recomputed_tokens + record.spliced_tokens + missed == inside
        ids = cache.model.tokenize("the river")
        spliced, text = (cache.logits(prompt, ids, spliced=way) for way in (True, False))
        if not stored:
            assert np.array_equal(spliced, text)
        assert np.abs(spliced - text).max() < 8.0  # near, or a row would be out of place: then it is 20 and more


def test_a_gap_before_a_chunk_that_is_damaged_is_computed_with_it(
    tiny_model: Any, profile: Profile, calls: list[int]
) -> None:
    with opened(tiny_model, profile, Nothing(), 0.0) as cache:
        cache.prefill(TEXTS[:4])
        prompt = cache.prompt([{"role": "user", "content": "what is the river?"}], TEXTS[:4])
        key = cache.key(TEXTS[2])
        assert key is not None
        victims = list(_objects(cache, key))
        for name in victims:
            data = cache.store.get("cas", name, max_bytes=1 << 20)
            assert data is not None
            cache.store.delete("cas", name)
            cache.store._objects[f"cas/{name}"] = data[:-1] + bytes([data[-1] ^ 1])  # type: ignore[attr-defined]
        calls.clear()
        with cache.stream(prompt) as stream:
            next(iter(stream))
            record = stream.record
        sources = [part.source for part in record.segments if part.kind == "document"]
        assert sources == ["store", "store", "text", "store"]
        assert sum(calls) == len(prompt) - record.spliced_tokens  # nothing is computed twice


def _objects(cache: KVCache, key: str) -> Iterator[str]:
    library = cache.library()
    assert library is not None
    pointer = cache.store.get("ac", key, max_bytes=1 << 20)
    assert pointer is not None
    yield from (segment.sha256 for segment in library.read_manifest(key, pointer).segments())
