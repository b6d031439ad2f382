"""A request over a network that fails in every way is answered from the text, in time, with the reason recorded."""

from __future__ import annotations

import time

import pytest
import synthetic

from cachegen_rag import KVCache, Sampling
from cachegen_rag.bench.server import ALWAYS_MISS, FAULTS, Fault, Link, ObjectServer
from cachegen_rag.stores import open_store
from cachegen_rag.streaming.costs import Costs
from cachegen_rag.streaming.pipeline import Loader

WORDS = "river city king science stone name where what the a of and document question answer passage cache key".split()
TEXTS = [" ".join(WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(70)) for i in range(2)]
GREEDY = Sampling(max_tokens=8)


class Setting:
    """A cache over a server, its documents stored, and its answers with and without them."""

    def __init__(self, model, server):
        self.model, self.server = model, server
        self.profile = synthetic.profile(model.shape)
        with self.open() as cache:
            cache.prefill(TEXTS)
            self.text, _ = self.ask(cache, spliced=False)
            self.spliced, record = self.ask(cache)
            assert record.spliced_tokens

    def open(self, **options):
        self.server.fault, self.server.link = None, Link()
        store = open_store(self.server.url, timeout=0.3)

        def loader(store, name):
            return Loader(store, name, costs=Costs())

        return KVCache(self.model, store, profile=self.profile, exact_bytes=0, loader=loader, **options)

    def ask(self, cache, **options):
        prompt = cache.prompt([{"role": "user", "content": "what is the name of the river?"}], TEXTS)
        stream = cache.stream(prompt, GREEDY, **options)
        return [token.id for token in stream], stream.record


@pytest.fixture(scope="module")
def setting(tiny_model):
    with ObjectServer() as server:
        yield Setting(tiny_model, server)


@pytest.mark.parametrize("where", ["/cas/", "/ac/"])
@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_the_answer_is_the_text_answer(setting, kind, where):
    with setting.open() as cache:
        cache.library()
        setting.server.fault = lambda method, path, number: Fault(kind, 0.6) if path.startswith(where) else None
        began = time.monotonic()
        answer, record = setting.ask(cache)
    documents = [s for s in record.segments if s.kind == "document"]
    if kind in ALWAYS_MISS or record.spliced_tokens == 0:
        assert answer == setting.text
        assert all(s.source == "text" and s.reason for s in documents)
    assert record.spliced_tokens == 0 or answer == setting.spliced or any(s.reason for s in documents)
    assert time.monotonic() - began < 4


def test_a_target_is_kept_and_levels_are_recorded(setting):
    with setting.open(slo=5.0) as cache:
        cache.library()
        setting.server.link = Link(rate=200_000)
        _, record = setting.ask(cache)
    documents = [s for s in record.segments if s.kind == "document"]
    assert record.ttft_ms < 5000
    assert all(s.level is not None or s.source == "text" for s in documents)


def test_a_tier_answers_when_the_server_is_gone(setting, tmp_path):
    options = {"profile": setting.profile, "exact_bytes": 0, "loader": lambda s, n: Loader(s, n, costs=Costs())}
    setting.server.fault, setting.server.link = None, Link()
    with KVCache(setting.model, open_store(setting.server.url, tier=tmp_path / "tier"), **options) as cache:
        answer, record = setting.ask(cache)
        assert record.spliced_tokens
    setting.server.fault = lambda *request: Fault("503")
    with KVCache(setting.model, open_store(setting.server.url, tier=tmp_path / "tier"), **options) as cache:
        again, record = setting.ask(cache)
    assert again == answer and record.spliced_tokens and record.bytes_fetched
