"""One suite per protocol: a class that the tests of every implementation subclass.

``StoreConformance`` wants a fixture ``store`` that yields an empty, open store. ``StoreMachine`` compares a store with
a dictionary over random sequences of calls.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from cachegen_rag.errors import (
    ConfigError,
    CorruptBitstreamError,
    DeadlineExceededError,
    StoreError,
    StoreUnavailableError,
)
from cachegen_rag.stores.base import NAMESPACES


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SIZES = (0, 1, 63, 4096, (32 << 10) - 1, 32 << 10, (1 << 20) + 7)


class StoreConformance:
    """What every store does. Set ``lists = False`` for one that cannot list keys or tell its size."""

    lists = True

    @pytest.fixture
    def store(self) -> Any:
        raise NotImplementedError("a subclass provides an empty store")

    @pytest.mark.parametrize("size", SIZES)
    def test_keeps_bytes_of_any_size(self, store: Any, size: int) -> None:
        data = os.urandom(size)
        assert store.get("cas", name_of(data)) is None
        store.put("cas", name_of(data), data)
        assert store.get("cas", name_of(data)) == data
        assert store.get("cas", name_of(data), max_bytes=size) == data
        assert type(store.get("cas", name_of(data))) is bytes

    def test_namespaces_are_apart(self, store: Any) -> None:
        data = b"manifest"
        key = name_of(data)
        store.put("ac", key, b"something else")
        assert store.get("cas", key) is None and not store.contains("cas", key)
        store.put("cas", key, data)
        assert store.get("ac", key) == b"something else"
        assert store.delete("ac", key)
        assert store.get("cas", key) == data

    def test_a_manifest_is_replaced(self, store: Any) -> None:
        key = name_of(b"document")
        for data in (b"first", os.urandom(50_000), b"third" * 20_000, b""):
            store.put("ac", key, data)
            assert store.get("ac", key) == data

    def test_putting_again_changes_nothing(self, store: Any) -> None:
        data = os.urandom(100_000)
        for _ in range(3):
            store.put("cas", name_of(data), data)
        assert store.get("cas", name_of(data)) == data
        if self.lists:
            assert store.size() == len(data)

    def test_contains_and_delete(self, store: Any) -> None:
        data = os.urandom(70_000)
        assert not store.contains("cas", name_of(data))
        assert store.delete("cas", name_of(data)) is False
        store.put("cas", name_of(data), data)
        assert store.contains("cas", name_of(data))
        assert store.delete("cas", name_of(data)) is True
        assert not store.contains("cas", name_of(data))
        assert store.get("cas", name_of(data)) is None
        store.put("cas", name_of(data), data)
        assert store.get("cas", name_of(data)) == data

    def test_lists_keys_and_measures(self, store: Any) -> None:
        objects = {name_of(d): d for d in (os.urandom(n) for n in (10, 40_000, 100_000))}
        for key, data in objects.items():
            store.put("cas", key, data)
        store.put("ac", name_of(b"m"), b"manifest")
        if self.lists:
            assert sorted(store.keys("cas")) == sorted(objects)
            assert list(store.keys("ac")) == [name_of(b"m")]
            assert store.size() == sum(map(len, objects.values())) + len(b"manifest")
        else:
            with pytest.raises(StoreError, match="list"):
                list(store.keys("cas"))
            with pytest.raises(StoreError, match="size"):
                store.size()

    @pytest.mark.parametrize("size", [100, 100_000])
    def test_an_object_larger_than_asked_for_is_not_read(self, store: Any, size: int) -> None:
        data = os.urandom(size)
        store.put("cas", name_of(data), data)
        with pytest.raises(CorruptBitstreamError, match=f"{size - 1:,}"):
            store.get("cas", name_of(data), max_bytes=size - 1)
        assert store.get("cas", name_of(data)) == data

    @pytest.mark.parametrize("key", ["", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n", b"a" * 64, None])
    def test_a_key_is_64_hex_digits(self, store: Any, key: Any) -> None:
        for call in (store.get, store.contains, store.delete):
            with pytest.raises(ConfigError, match="64"):
                call("cas", key)
        with pytest.raises(ConfigError, match="64"):
            store.put("ac", key, b"")

    @pytest.mark.parametrize("namespace", ["", "CAS", "cas/", "..", None])
    def test_there_are_two_namespaces(self, store: Any, namespace: Any) -> None:
        for call in (store.get, store.contains, store.delete):
            with pytest.raises(ConfigError, match="namespace"):
                call(namespace, "a" * 64)
        with pytest.raises(ConfigError, match="namespace"):
            store.put(namespace, "a" * 64, b"")

    def test_a_wrong_name_is_refused(self, store: Any) -> None:
        with pytest.raises(ConfigError, match="SHA-256"):
            store.put("cas", "a" * 64, b"not these bytes")
        assert not store.contains("cas", "a" * 64)

    @pytest.mark.parametrize("value", ["text", 7, None, bytearray(b"x")])
    def test_only_bytes_are_kept(self, store: Any, value: Any) -> None:
        with pytest.raises(ConfigError, match="bytes"):
            store.put("ac", "a" * 64, value)

    def test_a_deadline_that_has_passed(self, store: Any) -> None:
        data = b"late"
        store.put("cas", name_of(data), data)
        with pytest.raises(DeadlineExceededError):
            store.get("cas", name_of(data), deadline=time.monotonic() - 1)
        with pytest.raises(DeadlineExceededError):
            store.put("cas", name_of(data), data, deadline=time.monotonic() - 1)
        assert store.get("cas", name_of(data), deadline=time.monotonic() + 60) == data

    def test_threads_share_a_store(self, store: Any) -> None:
        objects = [os.urandom(1000 * n) for n in range(1, 41)]
        shared = name_of(b"shared")
        start = threading.Barrier(8)

        def work(worker: int) -> None:
            start.wait()
            for data in objects[worker::8]:
                store.put("cas", name_of(data), data)
                store.put("ac", shared, data)
                assert store.get("cas", name_of(data)) == data
                assert store.get("ac", shared) in objects

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert all(store.get("cas", name_of(data)) == data for data in objects)

    def test_closes_twice_and_then_says_so(self, store: Any) -> None:
        store.put("ac", "a" * 64, b"x")
        store.close()
        store.close()
        for call in (store.get, store.contains, store.delete):
            with pytest.raises(StoreUnavailableError, match="closed"):
                call("ac", "a" * 64)
        with pytest.raises(StoreUnavailableError, match="closed"):
            store.put("ac", "a" * 64, b"x")

    def test_says_what_it_is(self, store: Any) -> None:
        assert store.url.split(":")[0] in ("memory", "file", "http", "https")
        assert isinstance(store.remote, bool)
        assert store.url.split("://")[1] in repr(store)


class StoreMachine(RuleBasedStateMachine):
    """Random calls on a store and on a dictionary give the same answers. Subclasses define ``open()``."""

    names: Any = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[tuple[str, str], bytes] = {}
        self.store = self.open()

    def open(self) -> Any:
        raise NotImplementedError

    def reopen(self) -> Any:
        """A second look at the same objects; a store that keeps nothing returns the first."""
        return self.store

    @rule(target=names, namespace=st.sampled_from(NAMESPACES), size=st.sampled_from(SIZES[:-1]), byte=st.integers(0, 3))
    def put(self, namespace: str, size: int, byte: int) -> tuple[str, str]:
        data = bytes([byte]) * size
        key = name_of(data) if namespace == "cas" else name_of(bytes([byte]))
        self.store.put(namespace, key, data)
        self.model[namespace, key] = data
        return namespace, key

    @rule(name=names)
    def get(self, name: tuple[str, str]) -> None:
        assert self.store.get(*name) == self.model.get(name)
        assert self.store.contains(*name) == (name in self.model)

    @rule(name=names)
    def delete(self, name: tuple[str, str]) -> None:
        assert self.store.delete(*name) == (self.model.pop(name, None) is not None)

    @rule()
    def look_again(self) -> None:
        self.store = self.reopen()

    @invariant()
    def same_keys_and_size(self) -> None:
        for namespace in NAMESPACES:
            expected = sorted(key for ns, key in self.model if ns == namespace)
            assert sorted(self.store.keys(namespace)) == expected
        assert self.store.size() == sum(map(len, self.model.values()))

    def teardown(self) -> None:
        self.store.close()
