"""Read ahead: what a retriever announces is there when the request comes, is handed over once, and never stale."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from cachegen_rag import KVCache, Sampling, calibrate, open_store
from cachegen_rag.bench.server import Fault, ObjectServer
from cachegen_rag.fingerprint import content_hash
from cachegen_rag.streaming import ahead as module
from cachegen_rag.streaming.ahead import Ahead

WORDS = "river city king science stone name where what the a of and document question answer passage cache key".split()
TEXTS = [" ".join(WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(90)) for i in range(3)]


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as running:
        yield running


@pytest.fixture
def ahead(server: ObjectServer) -> Iterator[Ahead]:
    store = open_store(server.url)
    yield Ahead(store)
    store.close()


def put(server: ObjectServer, data: bytes) -> str:
    server.objects[f"/cas/{content_hash(data)}"] = data
    return content_hash(data)


def gets(server: ObjectServer, part: str = "/") -> int:
    return sum(method == "GET" and part in path for _, method, path in server.log)


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_object_is_read_once_and_handed_over_once(server: ObjectServer, ahead: Ahead) -> None:
    key = put(server, b"x" * 5000)
    assert not ahead.has_local("cas", key)
    ahead.prefetch("cas", key, 5000).result(10)
    ahead.prefetch("cas", key, 5000)
    assert ahead.has_local("cas", key) and gets(server) == 1
    assert ahead.fetch("cas", key).result(10) == b"x" * 5000 and gets(server) == 1
    assert not ahead.has_local("cas", key)
    assert ahead.fetch("cas", key).result(10) == b"x" * 5000 and gets(server) == 2
    assert ahead.get("cas", key) == b"x" * 5000


def test_bytes_on_their_way_are_told_to_the_request(server: ObjectServer, ahead: Ahead) -> None:
    key = put(server, b"x" * 200_000)
    server.link.rate = 400_000
    ahead.prefetch("cas", key, 200_000)
    seen: list[int] = []
    assert ahead.fetch("cas", key, on_bytes=seen.append).result(10) == b"x" * 200_000
    assert 0 < sum(seen) <= 200_000 and gets(server) == 1


@pytest.mark.parametrize("fault", ["404", "reset", "truncate"])
def test_what_failed_ahead_is_tried_anew(server: ObjectServer, ahead: Ahead, fault: str) -> None:
    key = put(server, b"x" * 5000)
    server.fault = lambda method, path, number: Fault(fault)
    wait_for(ahead.prefetch("cas", key, 5000).done)
    server.fault = None
    assert not ahead.has_local("cas", key)
    assert ahead.fetch("cas", key).result(10) == b"x" * 5000


def test_what_was_read_too_long_ago_is_read_again(server: ObjectServer, ahead: Ahead, monkeypatch: Any) -> None:
    key = "a" * 64
    server.objects[f"/ac/{key}"] = b"old"
    assert ahead.prefetch("ac", key).result(10) == b"old"
    server.objects[f"/ac/{key}"] = b"new"
    monkeypatch.setattr(module, "AHEAD_SECONDS", 0.0)
    assert ahead.fetch("ac", key).result(10) == b"new"


def test_there_is_a_limit(server: ObjectServer, ahead: Ahead, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", 10_000)
    keys = [put(server, bytes([n]) * 4000) for n in range(5)]
    for key in keys:
        ahead.prefetch("cas", key, 4000)
    wait_for(lambda: ahead.has_local("cas", keys[-1]))
    assert [ahead.has_local("cas", key) for key in keys[:3]] == [False] * 3


def test_a_request_finds_what_was_announced(
    server: ObjectServer, tiny_model: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no costs measured before
    profile = calibrate(tiny_model, TEXTS * 3)
    with KVCache(tiny_model, open_store(server.url), profile=profile) as cache:
        cache.prefill(TEXTS)
    with KVCache(tiny_model, open_store(server.url), profile=profile, exact_bytes=0) as cache:
        server.log.clear()
        cache.prefetch(TEXTS[:2])
        wait_for(lambda: gets(server, "/ac/") == 2 and gets(server, "/cas/") == 2)
        stream = cache.stream(cache.prompt([{"role": "user", "content": "Which?"}], TEXTS[:2]), Sampling(max_tokens=2))
        stream.text()
        assert [s.source for s in stream.record.segments if s.kind == "document"] == ["store", "store"]
        paths = [path for _, method, path in server.log if method == "GET"]
        assert len(paths) == len(set(paths)) and gets(server, "/cas/") == 2, "nothing was read twice"
        cache.prefetch(["a text that nobody has stored"])
        cache.prefetch([object()])
        wait_for(lambda: gets(server, "/ac/") > len(paths) - 2)


def test_a_dead_server_is_no_reason_to_fail(tiny_model: Any) -> None:
    with ObjectServer() as server:
        store = open_store(server.url)
    with KVCache(tiny_model, store) as cache:
        began = time.monotonic()
        cache.prefetch(TEXTS)
        assert time.monotonic() - began < 1
