from __future__ import annotations

import os

import pytest
from conformance import StoreConformance, StoreMachine, name_of
from hypothesis import settings

from cachegen_rag.errors import ConfigError, StoreFullError
from cachegen_rag.stores import open_store


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self):
        store = open_store("memory://")
        yield store
        store.close()

    def test_evicts_what_was_used_longest_ago(self):
        store = open_store("memory://", size_limit=1000)
        first, second, third = (os.urandom(400) for _ in range(3))
        store.put("cas", name_of(first), first)
        store.put("cas", name_of(second), second)
        assert store.get("cas", name_of(first)) == first
        store.put("cas", name_of(third), third)
        assert sorted(store.keys("cas")) == sorted([name_of(first), name_of(third)])
        assert store.size() == 800

    def test_an_object_beyond_the_limit_is_refused_and_evicts_nothing(self):
        store = open_store("memory://", size_limit=1000)
        store.put("ac", "a" * 64, b"x")
        with pytest.raises(StoreFullError, match="1,000"):
            store.put("ac", "b" * 64, bytes(1001))
        assert store.get("ac", "a" * 64) == b"x"


class MemoryMachine(StoreMachine):
    def open(self):
        return open_store("memory://")


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("ftp://host/x", "scheme"),
        ("s3://bucket", "scheme"),
        ("", "empty"),
        ("file://host/share", "file:///"),
        ("file:///x?y=1", "file:///"),
    ],
)
def test_a_url_that_names_no_store(url, match):
    with pytest.raises(ConfigError, match=match):
        open_store(url)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "20GB", None, True])
def test_a_size_limit_is_a_number_of_bytes(limit):
    with pytest.raises(ConfigError, match="size_limit"):
        open_store("memory://", size_limit=limit)


def test_options_of_a_remote_store_are_not_taken_silently():
    with pytest.raises(ConfigError, match="token"):
        open_store("memory://", token="secret")
