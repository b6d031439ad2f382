from __future__ import annotations

import hashlib
import os
import time

import pytest

from cachegen_rag.bench.server import Link, ObjectServer
from cachegen_rag.stores import open_store


@pytest.mark.parametrize("mbit", [5, 50, 400])
def test_a_shaped_link_passes_what_it_says(mbit):
    """A timer that wakes up late must not make the link slower, or figures would be of another link."""
    size = int(mbit * 125_000 * 0.4)
    data = os.urandom(size)
    key = hashlib.sha256(data).hexdigest()
    with ObjectServer() as server:
        store = open_store(server.url)
        store.put("cas", key, data)
        store.close()
        server.link = Link(rate=mbit * 125_000.0)
        store = open_store(server.url)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            assert store.get("cas", key) == data
            times.append(time.perf_counter() - began)
        store.close()
    assert 0.37 < min(times) < 0.46, times
