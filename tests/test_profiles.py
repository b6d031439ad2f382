"""Where a codec profile comes from: a store that cannot be read, holds damaged bytes or another model's profile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cachegen_rag import KVCache, Sampling, calibrate
from cachegen_rag.errors import (
    BitstreamError,
    CodecError,
    DeadlineExceededError,
    ProfileError,
    StoreError,
    StoreUnavailableError,
    UnknownLevelError,
)
from cachegen_rag.profiles import find_profile, load_profile, pointer_key, save_profile
from cachegen_rag.stores.memory import MemoryStore

TEXTS = ["the river and the city of the king " * 8, "a question of science, a stone and a name " * 8]


class Unsteady(MemoryStore):
    """Fails to read the objects named in ``broken``; keeps the deadlines it was given."""

    def __init__(self):
        super().__init__()
        self.broken, self.deadlines = {}, []

    def get(self, namespace, key, **options):
        self.deadlines.append(options.get("deadline"))
        if key in self.broken:
            raise self.broken[key]
        return super().get(namespace, key, **options)


@pytest.fixture(scope="module")
def profile(tiny_model):
    return calibrate(tiny_model, TEXTS)


@pytest.fixture
def store(tiny_model, profile):
    store = Unsteady()
    save_profile(store, tiny_model.fingerprint, "", profile)
    return store


def ask(cache):
    stream = cache.stream(cache.prompt([{"role": "user", "content": "which river?"}], TEXTS), Sampling(max_tokens=2))
    list(stream)
    return [segment.reason for segment in stream.record.segments if segment.kind == "document"]


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), DeadlineExceededError("late")], ids=repr)
@pytest.mark.parametrize("which", ["ac", "cas"])
def test_a_read_error_never_replaces_the_stored_profile(tiny_model, profile, store, which, error):
    before = dict(store._objects)
    store.broken = {pointer_key(tiny_model.fingerprint, "") if which == "ac" else profile.hash: error}
    cache = KVCache(tiny_model, store)
    with pytest.raises(type(error), match=str(error)):
        cache.prefill(TEXTS)
    assert all(str(error) in reason for reason in ask(cache))
    assert store._objects == before
    store.broken = {}
    assert cache.prefill(TEXTS).computed == 2 and cache.library().codec.profile.hash == profile.hash
    assert ask(cache) == [None, None]


def test_the_deadline_reaches_the_store(tiny_model, profile, store):
    assert find_profile(tiny_model, store, None, "", (), deadline=math.inf).hash == profile.hash
    assert store.deadlines == [math.inf] * 2


def test_an_absent_profile_is_none(tiny_model):
    assert load_profile(MemoryStore(), tiny_model.fingerprint, "") is None


def test_every_damage_is_told_from_absence_and_from_a_store_that_fails(tiny_model, store):
    for name, whole in list(store._objects.items()):
        step = max(1, len(whole) // 60)
        flipped = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), step)]
        for damaged in (b"", whole[:-1], *flipped):
            store._objects[name] = damaged
            with pytest.raises((BitstreamError, CodecError)) as raised:
                load_profile(store, tiny_model.fingerprint, "")
            assert not isinstance(raised.value, StoreError)
        store._objects[name] = whole


def test_a_profile_of_another_shape_is_not_used_but_replaced(tiny_model, tiny_path, profile, monkeypatch):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    with LlamaCppModel(tiny_path(layers=2), n_ctx=512, n_threads=1) as smaller:
        other = calibrate(smaller, TEXTS)
    monkeypatch.setattr("cachegen_rag.profiles.calibrate", lambda model, texts: profile)  # it takes seconds
    assert other.shape != tiny_model.shape
    store = MemoryStore()
    save_profile(store, tiny_model.fingerprint, "", other)
    with pytest.raises(ProfileError, match="for a KV of"):
        load_profile(store, tiny_model.fingerprint, "")
    cache = KVCache(tiny_model, store)
    assert all("no codec profile" in reason for reason in ask(cache))
    assert cache.prefill(TEXTS).computed == 2
    assert cache.library().codec.profile.hash == profile.hash and ask(cache) == [None, None]
    assert load_profile(store, tiny_model.fingerprint, "").hash == profile.hash


def test_fewer_levels_than_asked_for_is_an_error_in_prefill_and_a_miss_in_a_request(tiny_model, profile):
    few = replace(profile, levels=profile.levels[:1], default_level=profile.levels[0].index, _bytes=None)
    store = MemoryStore()
    save_profile(store, tiny_model.fingerprint, "", few)
    cache = KVCache(tiny_model, store, level=profile.levels[-1].index)
    assert all("no level" in reason for reason in ask(cache))
    with pytest.raises(UnknownLevelError, match="no level"):
        cache.prefill(TEXTS)
