"""KVCache: what an application sees. Each behaviour on the tiny model; the promises once more on the real one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cachegen_rag import KVCache, LlamaCppModel, Profile, Sampling
from cachegen_rag import cache as cache_module
from cachegen_rag.errors import (
    ConfigError,
    ContextOverflowError,
    ModelError,
    StoreFullError,
    StoreUnavailableError,
    UnknownLevelError,
)
from cachegen_rag.gate import Keeper
from cachegen_rag.idle import IdleWork
from cachegen_rag.manifest import Manifest
from cachegen_rag.prompt import Document, Prompt
from cachegen_rag.stores.memory import MemoryStore
from cachegen_rag.streaming.costs import Costs
from cachegen_rag.streaming.pipeline import Loader

WORDS = "river city king science stone name where what the a of and document question answer passage cache key".split()
TEXTS = [" ".join(WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(90)) for i in range(4)]
GREEDY = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def profile(tiny_model: Any) -> Profile:
    from cachegen_rag import calibrate

    return calibrate(tiny_model, TEXTS)


@pytest.fixture
def cache(tiny_model: Any, profile: Profile, tmp_path: Path) -> Iterator[KVCache]:
    with KVCache(tiny_model, tmp_path / "store", profile=profile, chunk_tokens=64) as opened:
        yield opened


def ask(cache: KVCache, documents: list[Any], question: str = "what is the name of the river?") -> Prompt:
    return cache.prompt([{"role": "user", "content": question}], documents)


def answer(cache: KVCache, prompt: Prompt, **options: Any) -> tuple[list[int], Any]:
    stream = cache.stream(prompt, GREEDY, **options)
    return [token.id for token in stream], stream.record


def test_prefill_then_hit(cache: KVCache) -> None:
    calls: list[tuple[int, int, int, float]] = []
    report = cache.prefill(TEXTS, progress=lambda *args: calls.append(args))
    assert (report.documents, report.computed, report.present, report.skipped) == (4, 4, 0, [])
    assert report.bytes > 0 and report.tokens > 0
    assert calls[0][:2] == (0, 4) and calls[-1][:2] == (4, 4)
    _, record = answer(cache, ask(cache, TEXTS[:2]))
    documents = [s for s in record.segments if s.kind == "document"]
    assert [s.source for s in documents] == ["store", "store"]
    assert all(s.reason is None and s.bytes > 0 and s.level is not None for s in documents)
    assert record.spliced_tokens + record.recomputed_tokens == sum(s.tokens for s in documents)
    assert 0 < record.ttft_ms <= record.total_ms
    stats = cache.stats()
    assert (stats.requests, stats.hits, stats.misses) == (1, 2, 0)
    assert stats.store_bytes and stats.store_documents


def test_a_second_prefill_computes_nothing(cache: KVCache) -> None:
    cache.prefill(TEXTS)
    again = cache.prefill(TEXTS)
    assert (again.computed, again.present, again.bytes) == (0, 4, 0)


def test_hits_stay_hits_and_answers_stay_the_same(cache: KVCache) -> None:
    cache.prefill(TEXTS)
    prompt = ask(cache, TEXTS[:2])
    first, record = answer(cache, prompt)
    for _ in range(4):
        ids, again = answer(cache, prompt)
        assert ids == first
        assert again.spliced_tokens == record.spliced_tokens > 0


def test_the_identity_is_the_content_not_the_id(cache: KVCache) -> None:
    cache.prefill([Document(TEXTS[0], "one")])
    assert cache.contains(Document(TEXTS[0], "other"))
    assert not cache.contains(Document(TEXTS[1], "one"))


def test_an_unknown_document_is_text_with_its_reason(cache: KVCache) -> None:
    cache.prefill(TEXTS[:1])
    prompt = ask(cache, TEXTS[:2])
    _, record = answer(cache, prompt)
    hit, miss = (s for s in record.segments if s.kind == "document")
    assert (hit.source, miss.source, miss.reason) == ("store", "text", "not in the store")
    assert cache.stats().miss_reasons == {"not in the store": 1}


def test_without_a_profile_the_first_documents_calibrate_one(tiny_model: Any, tmp_path: Path) -> None:
    with KVCache(tiny_model, tmp_path / "s") as cache:
        _, record = answer(cache, ask(cache, TEXTS[:1]))
        assert "no codec profile" in next(s.reason for s in record.segments if s.kind == "document")
        assert cache.prefill(TEXTS).computed == 4
    with KVCache(tiny_model, tmp_path / "s") as cache:  # the store kept it
        assert cache.contains(TEXTS[0])


def test_two_documents_alike_in_one_prompt(cache: KVCache) -> None:
    cache.prefill(TEXTS[:1])
    _, record = answer(cache, ask(cache, [TEXTS[0], TEXTS[0]]))
    assert [s.source for s in record.segments if s.kind == "document"] == ["store", "store"]


@pytest.mark.parametrize("document", ["", "a"], ids=["empty", "one token"])
def test_very_short_documents(cache: KVCache, document: str) -> None:
    report = cache.prefill([document])
    assert report.computed + len(report.skipped) == 1
    ids, record = answer(cache, ask(cache, [document, TEXTS[0]]))
    short, _ = (s for s in record.segments if s.kind == "document")
    assert len(ids) == 12
    assert (short.source, short.tokens) == (("store", 1) if document else ("text", 0))


def damage(data: bytes, how: str) -> bytes | None:
    middle = len(data) // 2
    if how == "flip":
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return {"delete": None, "truncate": data[:middle], "empty": b"", "longer": data + b"\0"}[how]


class Rotten(MemoryStore):
    """A store whose objects of one namespace come back damaged."""

    rot: tuple[str, str] | None = None

    def get(self, namespace: Any, key: str, **options: Any) -> bytes | None:
        data = super().get(namespace, key, **options)
        if self.rot is None or namespace != self.rot[0] or data is None:
            return data
        return damage(data, self.rot[1])


@pytest.mark.parametrize("namespace", ["cas", "ac"])
@pytest.mark.parametrize("how", ["delete", "truncate", "flip", "empty", "longer"])
def test_damaged_objects_never_change_the_answer(tiny_model: Any, profile: Profile, namespace: str, how: str) -> None:
    store = Rotten()
    with KVCache(tiny_model, store, profile=profile, chunk_tokens=64) as cache:
        cache.prefill(TEXTS[:2])
        prompt = ask(cache, TEXTS[:2])
        store.rot = (namespace, how)
        text, _ = answer(cache, prompt, spliced=False)
        ids, record = answer(cache, prompt)
        assert ids == text
        assert all(s.source == "text" and s.reason for s in record.segments if s.kind == "document")
        assert cache.stats().misses == 4
        store.rot = None
        assert answer(cache, prompt)[1].spliced_tokens > 0  # and nothing of the damage stays behind


def test_one_damaged_chunk_costs_only_that_chunk(cache: KVCache) -> None:
    cache.prefill(TEXTS[:1])
    key = cache.key(TEXTS[0])
    assert key is not None
    manifest = Manifest.from_bytes(cache.store.get("ac", key) or b"")
    assert len(manifest.chunks) > 1
    cache.store.delete("cas", manifest.chunks[1].levels[0].segments[0].sha256)
    _, record = answer(cache, ask(cache, TEXTS[:1]))
    (part,) = (s for s in record.segments if s.kind == "document")
    assert part.source == "store" and part.reason and "gone" in part.reason
    assert part.recomputed >= manifest.chunks[1].stop - manifest.chunks[1].start
    assert not cache.contains(TEXTS[0])
    assert cache.prefill(TEXTS[:1]).computed == 1
    assert cache.contains(TEXTS[0])


def test_a_store_that_fails_is_a_miss(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.prefill(TEXTS[:1])
    prompt = ask(cache, TEXTS[:1])
    text, _ = answer(cache, prompt, spliced=False)

    def fail(*args: Any, **options: Any) -> None:
        raise StoreUnavailableError("the disk is on fire")

    monkeypatch.setattr(cache.store, "get", fail)
    ids, record = answer(cache, prompt)
    assert ids == text
    assert "on fire" in next(s.reason for s in record.segments if s.kind == "document")


@pytest.mark.parametrize("given", [True, False], ids=["profile given", "profile in the store"])
def test_a_server_that_is_silent_costs_one_request_a_moment(tiny_model: Any, profile: Profile, given: bool) -> None:
    import socket
    import time

    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:  # connects, and never says a word
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with KVCache(tiny_model, url, profile=profile if given else None, slo=0.5) as cache:
            prompt = ask(cache, TEXTS[:2])
            text, _ = answer(cache, prompt, spliced=False)
            seconds = []

            def request() -> None:
                began = time.monotonic()
                ids, record = answer(cache, prompt)
                seconds.append(time.monotonic() - began)
                assert ids == text
                assert all(s.source == "text" and s.reason for s in record.segments if s.kind == "document")

            with ThreadPoolExecutor(3) as pool:
                for together in [pool.submit(request) for _ in range(3)]:
                    together.result(60)
            assert max(seconds) < 8
            request()
            assert seconds[-1] < 2
            began = time.monotonic()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("when", ["before the first token", "while it waits for the model", "while chunks decode"])
def test_closing_the_cache_never_fails_or_hangs_a_request(tiny_model: Any, profile: Profile, when: str) -> None:
    reading = threading.Event()

    class Slow(MemoryStore):
        def get(self, namespace: Any, key: str, **options: Any) -> bytes | None:
            if namespace == "cas" and when == "while chunks decode":
                reading.set()
                closing.wait(10)
            return super().get(namespace, key, **options)

    closing = threading.Event()
    # Costs that nothing is known of: the store is asked, however fast this machine computes.
    cache = KVCache(
        tiny_model,
        Slow(),
        profile=profile,
        chunk_tokens=16,
        loader=lambda store, name: Loader(store, name, costs=Costs()),
    )
    cache.prefill(TEXTS[:2])
    prompt = ask(cache, TEXTS[:2])
    text, _ = answer(cache, prompt, spliced=False)
    with ThreadPoolExecutor(1) as pool:
        if when == "before the first token":
            stream = cache.stream(prompt, GREEDY)
            cache.close()
            assert [token.id for token in stream] == text
        elif when == "while it waits for the model":
            with tiny_model.session():
                request = pool.submit(answer, cache, prompt)
                while not tiny_model._turns._waiting:
                    assert not request.done()
                cache.close()
            ids, record = request.result(30)
            assert ids == text and record.spliced_tokens == 0
        else:
            request = pool.submit(answer, cache, prompt)
            assert reading.wait(10)
            threading.Timer(0.2, closing.set).start()
            cache.close()
            ids, record = request.result(30)
            assert len(ids) == len(text)
            assert any("closed" in (s.reason or "") for s in record.segments)


def test_a_stream_that_is_collected_while_statistics_are_read(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end a forgotten stream at any allocation, also under the lock of the counts."""
    prompt = ask(cache, TEXTS[:1])
    forgotten = [cache.stream(prompt, GREEDY)]
    next(forgotten[0])
    replace = cache_module.dataclasses.replace

    def collect(*args: Any, **options: Any) -> Any:
        if forgotten:
            forgotten.pop().close()
        return replace(*args, **options)

    monkeypatch.setattr(cache_module.dataclasses, "replace", collect)
    thread = threading.Thread(target=cache.stats, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and cache.stats().requests == 1


def test_tenants_are_apart(tiny_model: Any, profile: Profile) -> None:
    store = MemoryStore()
    ours = KVCache(tiny_model, store, profile=profile, salt="ours")
    theirs = KVCache(tiny_model, store, profile=profile, salt="theirs")
    ours.prefill(TEXTS[:1])
    assert ours.contains(TEXTS[0]) and not theirs.contains(TEXTS[0])
    assert not {ours.key(t) for t in TEXTS} & {theirs.key(t) for t in TEXTS}


def test_delete_keeps_what_others_share(tiny_model: Any, profile: Profile) -> None:
    with KVCache(tiny_model, MemoryStore(), profile=profile, chunk_tokens=16) as cache:
        start = tiny_model.detokenize(tiny_model.tokenize(TEXTS[0])[:32])
        longer = start + TEXTS[1]
        cache.prefill([start, longer])
        assert cache.delete(start) and not cache.delete(start)
        assert not cache.contains(start) and cache.contains(longer)
        assert cache.verify()["incomplete"] == []
        assert cache.delete(longer)
        assert not list(cache.store.keys("ac")) and not list(cache.store.keys("cas"))


def test_too_much_for_the_context_is_one_error_before_any_compute(cache: KVCache) -> None:
    prompt = ask(cache, TEXTS * 30)
    with pytest.raises(ContextOverflowError, match=r"\d+ tokens .* context holds 2048"):
        cache.stream(prompt, GREEDY)
    assert cache.stats().requests == 0


def test_a_document_too_long_to_store_is_skipped_with_its_reason(cache: KVCache) -> None:
    report = cache.prefill([" ".join(TEXTS * 20)])
    assert report.computed == 0 and "2048" in report.skipped[0][1]


def test_an_unknown_level_names_the_levels(tiny_model: Any, profile: Profile) -> None:
    with (
        KVCache(tiny_model, "memory://", profile=profile, level=99) as cache,
        pytest.raises(UnknownLevelError, match="99"),
    ):
        cache.prefill(TEXTS[:1])


@pytest.mark.parametrize(
    "options", [{"recompute": -1}, {"chunk_tokens": 0}, {"max_document_tokens": 0}], ids=lambda o: next(iter(o))
)
def test_bad_settings_name_the_setting(tiny_model: Any, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        KVCache(tiny_model, "memory://", **options)  # type: ignore[arg-type]


def test_something_that_is_no_document(cache: KVCache) -> None:
    with pytest.raises(ConfigError, match="int"):
        cache.prefill([3])


def test_a_profile_that_cannot_be_read(tiny_model: Any, tmp_path: Path) -> None:
    with KVCache(tiny_model, "memory://", profile=tmp_path / "none") as cache, pytest.raises(ConfigError, match="none"):
        cache.prefill(TEXTS[:1])


@pytest.mark.parametrize("recompute", [1, 8, 64, 10_000])
def test_recomputed_heads(tiny_model: Any, profile: Profile, recompute: int) -> None:
    with KVCache(tiny_model, "memory://", profile=profile, recompute=recompute) as cache:
        cache.prefill(TEXTS[:2])
        prompt = ask(cache, TEXTS[:2])
        _, record = answer(cache, prompt)
        tokens = sum(s.tokens for s in record.segments if s.kind == "document")
        assert record.spliced_tokens + record.recomputed_tokens in (tokens, 0)
        if recompute == 10_000:
            assert record.spliced_tokens == 0


def test_cutting_a_document_is_the_same_in_both_paths(tiny_model: Any, profile: Profile) -> None:
    with KVCache(tiny_model, "memory://", profile=profile, max_document_tokens=50) as cache:
        cache.prefill(TEXTS[:1])
        prompt = ask(cache, TEXTS[:1])
        assert [len(s) for s in prompt.segments if s.kind == "document"] == [50]
        assert answer(cache, prompt)[1].spliced_tokens > 0


def test_closing_a_stream_frees_the_model(cache: KVCache) -> None:
    cache.prefill(TEXTS[:1])
    prompt = ask(cache, TEXTS[:1])
    stream = cache.stream(prompt, Sampling(max_tokens=500))
    next(stream)
    stream.close()
    stream.close()
    assert answer(cache, prompt)[0]
    assert cache.stats().requests == 2


def test_many_threads_get_the_right_answers(cache: KVCache) -> None:
    cache.prefill(TEXTS)
    prompts = [ask(cache, [text]) for text in TEXTS]
    alone = [answer(cache, prompt)[0] for prompt in prompts]
    got: dict[int, list[int]] = {}

    def work(n: int) -> None:
        got[n] = answer(cache, prompts[n % 4])[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {n: alone[n % 4] for n in range(12)}


def test_an_observer_sees_every_request_and_never_fails_one(tiny_model: Any, profile: Profile) -> None:
    seen: list[Any] = []

    def observe(record: Any) -> None:
        seen.append(record)
        raise RuntimeError("an observer's own fault")

    with KVCache(tiny_model, "memory://", profile=profile, on_request=observe) as cache:
        assert answer(cache, ask(cache, TEXTS[:1]))[0]
    assert len(seen) == 1 and seen[0].total_ms > 0


FILL = """
import sys
from cachegen_rag import KVCache, LlamaCppModel
import test_cache
model = LlamaCppModel(sys.argv[1], n_ctx=2048, n_threads=1)
with KVCache(model, sys.argv[2], profile=sys.argv[3], chunk_tokens=64) as cache:
    report = cache.prefill(test_cache.TEXTS)
    assert report.computed + report.present == 4, report
"""


def test_two_processes_fill_one_directory(tiny_model: Any, tiny_gguf: Path, profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "profile").write_bytes(profile.to_bytes())
    arguments = [str(tiny_gguf), str(tmp_path / "store"), str(tmp_path / "profile")]
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{FILL}",
        *arguments,
    ]
    for process in [subprocess.Popen(command) for _ in range(2)]:
        assert process.wait(120) == 0
    with KVCache(tiny_model, tmp_path / "store", profile=profile, chunk_tokens=64) as cache:
        assert cache.prefill(TEXTS).present == 4
        checked = cache.verify()
        assert (checked["damaged"], checked["incomplete"]) == ([], [])


@pytest.mark.parametrize("name", ["heads", "query", "heads+query"])
def test_recompute_methods_keep_to_their_budget(tiny_model: Any, profile: Profile, name: str) -> None:
    from cachegen_rag.recompute import Recompute, method

    with KVCache(tiny_model, "memory://", profile=profile, recompute=Recompute(method(name), 0.2)) as cache:
        cache.prefill(TEXTS[:3])
        prompt = ask(cache, TEXTS[:3])
        first, record = answer(cache, prompt)
        tokens = sum(s.tokens for s in record.segments if s.kind == "document")
        assert 0 < record.recomputed_tokens <= 0.2 * tokens + 8
        assert record.spliced_tokens == tokens - record.recomputed_tokens
        assert answer(cache, prompt)[0] == first


def test_recomputing_everything_is_the_text_path(tiny_model: Any, profile: Profile) -> None:
    from cachegen_rag.recompute import Recompute, method

    with KVCache(tiny_model, "memory://", profile=profile, recompute=Recompute(method("query"), 1.0)) as cache:
        cache.prefill(TEXTS[:2])
        prompt = ask(cache, TEXTS[:2])
        assert answer(cache, prompt)[0] == answer(cache, prompt, spliced=False)[0]


def test_a_stored_leading_run_is_reused_exactly(cache: KVCache) -> None:
    prompt = ask(cache, TEXTS[:3])
    cache.prefill(TEXTS[2:3])
    assert cache.store_leading(prompt, 2)
    _, record = answer(cache, prompt)
    assert [s.source for s in record.segments if s.kind == "document"] == ["exact", "exact", "store"]
    other = ask(cache, [TEXTS[1], TEXTS[0]])  # another order is another run
    assert all(s.source == "text" for s in answer(cache, other)[1].segments if s.kind == "document")


def test_exact_reuse_at_the_exact_level_gives_the_text_answer(tiny_model: Any, profile: Profile) -> None:
    with KVCache(tiny_model, "memory://", profile=profile, level=0) as cache:
        prompt = ask(cache, TEXTS[:2])
        assert cache.store_leading(prompt, 2)
        ids, record = answer(cache, prompt)
        assert record.spliced_tokens > 0
        assert ids == answer(cache, prompt, spliced=False)[0]


def test_repeated_combinations_become_exact(cache: KVCache) -> None:
    cache.prefill(TEXTS)
    prompt = ask(cache, TEXTS[:2])
    assert cache.learn() == 0
    for _ in range(3):
        answer(cache, prompt)
    assert cache.learn() >= 1
    _, record = answer(cache, ask(cache, TEXTS[:2], "another question about the stone?"))
    assert [s.source for s in record.segments if s.kind == "document"] == ["exact", "exact"]


def test_requests_can_be_cancelled(cache: KVCache) -> None:
    from cachegen_rag.errors import RequestCancelledError

    stop = False
    stream = cache.stream(ask(cache, TEXTS[:1]), Sampling(max_tokens=50), cancelled=lambda: stop)
    next(stream)
    stop = True
    with pytest.raises(RequestCancelledError):
        list(stream)
    assert answer(cache, ask(cache, TEXTS[:1]))[0]


@pytest.mark.parametrize(
    "documents", ["a text", b"x", None, 5, {"page_content": "x"}, Document("a text"), [5], [None]], ids=repr
)
def test_what_is_no_list_of_documents(cache: KVCache, documents: Any) -> None:
    with pytest.raises(ConfigError, match="document"):
        cache.prefill(documents)
    with pytest.raises(ConfigError, match="document"):
        cache.prompt([{"role": "user", "content": "hello"}], documents)


@pytest.mark.parametrize(
    "message",
    ["hello", 5, {"content": "x"}, {"role": "user"}, {"role": 3, "content": "x"}, {"role": "user", "content": [{}]}],
    ids=repr,
)
def test_what_is_no_message(cache: KVCache, message: Any) -> None:
    with pytest.raises(ConfigError, match="message"):
        cache.prompt([message])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("salt", None), ("salt", b"x"), ("salt", "\ud800"), ("chunk_tokens", 1.5), ("chunk_tokens", float("nan")),
        ("max_document_tokens", 2.5), ("recompute", "3"), ("store", None), ("store", 5), ("level", "fine"),
        ("level", -1), ("level", True), ("levels", 3), ("levels", "12"), ("levels", [1.5]), ("splice", "no"),
        ("store_missed", 1), ("exact_bytes", -1), ("exact_bytes", "1GiB"), ("slo", "2s"), ("slo", 0), ("slo", -1.0),
        ("slo", float("nan")), ("slo", float("inf")), ("loader", None), ("on_request", "print"),
    ],
)  # fmt: skip
def test_settings_of_a_wrong_type(tiny_model: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        KVCache(tiny_model, **{"store": MemoryStore(), name: value})


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("messages", lambda cache, prompt, value: cache.prompt(value)),
        ("template_args", lambda cache, prompt, value: cache.prompt([], template_args=value)),
        ("prompt", lambda cache, prompt, value: cache.stream(value)),
        ("sampling", lambda cache, prompt, value: cache.stream(prompt, value)),
        ("cancelled", lambda cache, prompt, value: cache.stream(prompt, cancelled=value)),
        ("prompt", lambda cache, prompt, value: cache.logits(value, [1])),
        ("answer", lambda cache, prompt, value: cache.logits(prompt, value)),
        ("answer", lambda cache, prompt, value: cache.logits(prompt, [1, value])),
        ("progress", lambda cache, prompt, value: cache.prefill(TEXTS[:1], value)),
        ("limit", lambda cache, prompt, value: cache.learn(value)),
        ("documents", lambda cache, prompt, value: cache.store_leading(prompt, value)),
        ("model", lambda cache, prompt, value: KVCache(value, MemoryStore())),
        ("path", lambda cache, prompt, value: LlamaCppModel(value)),
    ],
)
@pytest.mark.parametrize("value", [2.5, True, object()], ids=lambda v: type(v).__name__)
def test_arguments_of_a_wrong_type(cache: KVCache, name: str, call: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        call(cache, ask(cache, TEXTS[:1]), value)


@pytest.mark.parametrize("answer", ["text", b"ids", [], [1.0], None, [None], [[1]]], ids=repr)
def test_answers_that_are_no_token_ids(cache: KVCache, answer: Any) -> None:
    with pytest.raises(ConfigError, match="answer"):
        cache.logits(ask(cache, TEXTS[:1]), answer)


def test_answers_that_the_model_cannot_have_given(cache: KVCache) -> None:
    for wrong in (-1, 1 << 40):
        with pytest.raises(ModelError, match="vocabulary"):
            cache.logits(ask(cache, TEXTS[:1]), [1, wrong, 1])
    with pytest.raises(ContextOverflowError):
        cache.logits(ask(cache, TEXTS[:1]), [1] * cache.model.n_ctx)
    with pytest.raises(ConfigError, match="empty"):
        cache.logits(Prompt(()), [1])


@pytest.mark.parametrize("profile", [b"x", 5, "no such file", "\0", Path("/")], ids=repr)
def test_what_is_no_profile(tiny_model: Any, profile: Any) -> None:
    with KVCache(tiny_model, MemoryStore(), profile=profile) as cache, pytest.raises(ConfigError, match="profile"):
        cache.prefill(TEXTS[:1])


@pytest.mark.parametrize("identity", [5, b"x", object(), ["x"]], ids=lambda i: type(i).__name__)
def test_ids_of_documents_are_text_in_the_records(cache: KVCache, identity: Any) -> None:
    with pytest.raises(ConfigError, match="id must be"):
        Document(TEXTS[0], identity)
    foreign = types.SimpleNamespace(page_content=TEXTS[0], id=identity)
    record = answer(cache, ask(cache, [foreign]))[1]
    assert json.loads(json.dumps(record.as_dict()))["segments"][1]["doc_id"] == str(identity)


def test_a_missed_document_is_stored_after_the_answer(cache: KVCache) -> None:
    cache.idle = IdleWork(0)
    cache.prefill(TEXTS[:1])
    prompt = ask(cache, [*TEXTS[:3], TEXTS[2]])
    _, record = answer(cache, prompt)
    assert [s.source for s in record.segments if s.kind == "document"] == ["store", "text", "text", "text"]
    assert record.stored_tokens == sum(len(s) for s in ask(cache, TEXTS[1:3]).segments if s.kind == "document")
    assert cache.idle.flush(30)
    _, again = answer(cache, prompt)
    assert [s.source for s in again.segments if s.kind == "document"] == ["store"] * 4 and again.stored_tokens == 0
    assert cache.contains(TEXTS[1]) and cache.prefill(TEXTS[:3]).computed == 0


@pytest.mark.parametrize("why", ["switched off", "from the text", "splicing is off", "remote", "the gate is closed"])
def test_what_is_not_stored_after_the_answer(
    tiny_model: Any, profile: Profile, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store.remote = why == "remote"
    options = {"switched off": {"store_missed": False}, "splicing is off": {"splice": False}}.get(why, {})
    with KVCache(tiny_model, store, profile=profile, **options) as cache:  # type: ignore[arg-type]
        cache.idle = IdleWork(0)
        if why == "the gate is closed":
            monkeypatch.setattr(Keeper, "refusal", lambda *args: "too different")
        _, record = answer(cache, ask(cache, TEXTS[:1]), spliced=why != "from the text")
        assert record.stored_tokens == 0 and len(cache.idle) == 0 and not cache.contains(TEXTS[0])


def test_a_request_does_not_wait_for_what_is_stored_after_another(
    tiny_model: Any, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work under way gives the model up, and begins again when the request has ended."""
    from cachegen_rag.warm import WarmContext

    began, compute, order = threading.Event(), WarmContext.compute_many, []

    def computing(self: Any, session: Any, documents: Any) -> Iterator[Any]:
        order.append("begins")
        began.set()
        while not cache.idle._busy and len(order) == 1:
            pass
        yield from compute(self, session, documents)
        order.append("stored")

    with KVCache(tiny_model, MemoryStore(), profile=profile) as cache:
        cache.idle = IdleWork(0)
        monkeypatch.setattr(WarmContext, "compute_many", computing)
        answer(cache, ask(cache, TEXTS[:1]))
        assert began.wait(10)
        answer(cache, ask(cache, []))
        order.append("answered")
        assert cache.idle.flush(30)
    assert order[0] == "begins" and order[-1] == "stored" and "answered" in order
    assert order.index("stored") > order.index("answered") or order.count("begins") == 2


def test_a_full_store_costs_the_storing_not_the_answer(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.idle = IdleWork(0)

    def full(*args: Any) -> None:
        raise StoreFullError("no room")

    monkeypatch.setattr(cache.store, "put", full)
    assert answer(cache, ask(cache, TEXTS[:1]))[1].stored_tokens > 0
    assert cache.idle.flush(30) and not cache.contains(TEXTS[0])
