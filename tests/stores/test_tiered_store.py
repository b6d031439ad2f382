from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conformance import StoreConformance, name_of

from cachegen_rag.bench.server import Fault, ObjectServer
from cachegen_rag.errors import StoreUnavailableError
from cachegen_rag.stores import open_store

DATA = os.urandom(200_000)
KEY = name_of(DATA)


class TestWriteThrough(StoreConformance):
    lists = False
    write_back = False

    @pytest.fixture
    def store(self, tmp_path):
        with ObjectServer() as server:
            store = open_store(server.url, tier=tmp_path / "tier", write_back=self.write_back)
            yield store
            store.close()


class TestWriteBack(TestWriteThrough):
    write_back = True


@pytest.fixture
def server():
    with ObjectServer() as server:
        yield server


def tiered(server, tmp_path, **options):
    return open_store(server.url, tier=tmp_path / "tier", **options)


@pytest.mark.parametrize("how", ["get", "fetch"])
def test_what_was_read_once_needs_no_network(server, tmp_path, how):
    server.objects[f"/cas/{KEY}"] = DATA
    store = tiered(server, tmp_path)
    assert not store.has_local("cas", KEY)
    assert (store.get("cas", KEY) if how == "get" else store.fetch("cas", KEY).result()) == DATA
    store._keeper.submit(lambda: None).result()
    assert store.has_local("cas", KEY)
    asked = len(server.log)
    assert store.get("cas", KEY) == DATA and store.fetch("cas", KEY).result() == DATA
    assert len(server.log) == asked
    store.close()
    assert tiered(server, tmp_path).get("cas", KEY) == DATA
    assert len(server.log) == asked


def test_wrong_bytes_are_not_kept(server, tmp_path):
    server.objects[f"/cas/{KEY}"] = DATA[:-1] + b"?"
    store = tiered(server, tmp_path)
    assert store.get("cas", KEY) != DATA  # the caller verifies
    assert not store.has_local("cas", KEY)
    store.close()


def test_a_damaged_local_copy_is_replaced(server, tmp_path):
    store = tiered(server, tmp_path)
    store.put("cas", KEY, DATA)
    (path,) = Path(store.local.directory).glob("??/??/*.val")
    path.write_bytes(DATA[:-1])
    assert store.get("cas", KEY) == DATA
    assert store.local.get("cas", KEY) == DATA
    store.close()


def test_a_full_tier_does_not_matter(server, tmp_path):
    server.objects[f"/cas/{KEY}"] = DATA
    store = tiered(server, tmp_path, size_limit=1000)
    assert store.get("cas", KEY) == DATA
    store.close()


def test_write_through_says_that_the_server_is_gone(server, tmp_path):
    server.fault = lambda *request: Fault("500")
    store = tiered(server, tmp_path)
    with pytest.raises(StoreUnavailableError, match="500"):
        store.put("cas", KEY, DATA)
    assert store.contains.__self__ is not None
    server.fault = None
    store.put("cas", KEY, DATA)
    assert server.objects[f"/cas/{KEY}"] == DATA
    store.close()


def test_write_back_uploads_in_order_through_an_outage(server, tmp_path):
    down = [True]
    server.fault = lambda *request: Fault("500") if down[0] else None
    store = tiered(server, tmp_path, write_back=True)
    objects = [os.urandom(10_000) for _ in range(5)]
    began = time.monotonic()
    for data in objects:
        store.put("cas", name_of(data), data)
    store.put("ac", KEY, b"manifest")
    assert time.monotonic() - began < 2
    assert not store.flush(timeout=0.2)
    down[0] = False
    assert store.flush(timeout=20)
    assert list(dict.fromkeys(server.objects)) == [*(f"/cas/{name_of(d)}" for d in objects), f"/ac/{KEY}"]
    store.close()


def test_sync_sends_what_an_earlier_process_could_not(server, tmp_path):
    local = open_store(tmp_path / "tier")
    local.put("ac", KEY, b"manifest")
    local.put("cas", KEY, DATA)
    local.close()
    store = tiered(server, tmp_path)
    assert store.sync() == 2 and store.sync() == 0
    assert list(server.objects) == [f"/cas/{KEY}", f"/ac/{KEY}"]
    store.close()
