"""The shadow check: what is drawn, what is counted, and that no request waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cachegen_rag import KVCache, Sampling
from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.codec.profile import Profile
from cachegen_rag.errors import RequestCancelledError
from cachegen_rag.idle import IdleWork
from cachegen_rag.shadow import ANSWER_TOKENS, Shadow, ShadowCheck
from cachegen_rag.stores.memory import MemoryStore

TEXTS = ["the king of the river", "the stone in the city is a name"]
GREEDY = Sampling(max_tokens=ANSWER_TOKENS + 4)


@pytest.fixture(scope="module")
def profile(tiny_model: Any) -> Profile:
    return calibrate(tiny_model, ["the king of the river and the city " * 60])


@pytest.fixture
def checks() -> list[ShadowCheck]:
    return []


@pytest.fixture
def cache(tiny_model: Any, profile: Profile, checks: list[ShadowCheck]) -> Iterator[KVCache]:
    with KVCache(tiny_model, MemoryStore(), profile=profile, shadow_fraction=1.0, on_shadow=checks.append) as opened:
        opened.idle = IdleWork(0.0)
        opened.prefill(TEXTS)
        yield opened
        opened.idle.close()


def ask(cache: KVCache, documents: list[str] = TEXTS) -> Any:
    prompt = cache.prompt([{"role": "user", "content": "who is the king?"}], documents)
    with cache.stream(prompt, GREEDY) as stream:
        stream.text()
    return stream.record


def test_a_fraction_is_drawn_and_what_is_found_is_summed_up() -> None:
    assert not any(Shadow(0.0).draw() for _ in range(50))
    assert all(Shadow(1.0).draw() for _ in range(50))
    some = Shadow(0.25, seed=1)
    names = [name for _ in range(1000) if (name := some.draw())]
    assert 180 < len(names) < 320 and len(set(names)) == len(names)
    shadow = Shadow(1.0)
    assert shadow.figures == {"shadow_checks": 0, "shadow_kl": None, "shadow_top1": None}
    sure, unsure = np.array([[5.0, 0.0], [5.0, 0.0]], np.float32), np.array([[5.0, 0.0], [0.0, 5.0]], np.float32)
    assert shadow.check("m", sure, sure) == ShadowCheck("m", 0.0, 1.0, 2)
    found = shadow.check("m", sure, unsure)
    p = 1 / (1 + np.exp(-5.0))
    wanted = p * 5 - (1 - p) * 5  # KL of the second token; the first is the same
    assert found.kl == pytest.approx(wanted / 2) and found.top1 == 0.5
    assert shadow.figures == {"shadow_checks": 2, "shadow_kl": pytest.approx(wanted / 4), "shadow_top1": 0.75}


def test_a_spliced_request_is_checked_after_its_answer(
    cache: KVCache, checks: list[ShadowCheck], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cachegen_rag"):
        record = ask(cache)
        assert record.spliced_tokens and cache.idle.flush(30)
    assert len(checks) == 1 and checks[0].model == cache.model.name
    assert 0 < checks[0].kl < 5 and checks[0].tokens == min(ANSWER_TOKENS, record.completion_tokens)
    stats = cache.stats()
    assert (stats.shadow_checks, stats.shadow_kl, stats.shadow_top1) == (1, checks[0].kl, checks[0].top1)
    assert stats.requests == 1, "a check is no request"
    assert "shadow check: KL" in caplog.text


def test_only_what_was_spliced_is_checked(cache: KVCache, checks: list[ShadowCheck]) -> None:
    cache._store_missed = False
    ask(cache, ["nobody has stored this"])
    prompt = cache.prompt([{"role": "user", "content": "who is the king?"}], TEXTS)
    cache.stream(prompt, GREEDY, spliced=False).text()
    stream = cache.stream(prompt, GREEDY)
    next(stream)
    stream.close()  # cancelled
    assert cache.idle.flush(30) and not checks


def test_a_request_interrupts_the_check_which_is_done_later(
    cache: KVCache, checks: list[ShadowCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    logits = cache._logits

    def slow(prompt: Any, answer: Any, spliced: bool, cancelled: Any) -> Any:
        begun.append(spliced)
        end = time.monotonic() + 20
        while len(begun) == 1 and not cancelled():  # the first attempt lasts until a request comes
            assert time.monotonic() < end, "nothing interrupted it"
            time.sleep(0.002)
        if len(begun) == 1:
            raise RequestCancelledError("as a decode does that is interrupted")
        return logits(prompt, answer, spliced, cancelled)

    monkeypatch.setattr(cache, "_logits", slow)
    ask(cache)
    end = time.monotonic() + 20
    while not begun:
        assert time.monotonic() < end
        time.sleep(0.002)
    cache._shadow = Shadow(0.0)
    record = ask(cache)
    assert record.completion_tokens and not checks
    assert cache.idle.flush(30)
    assert len(checks) == 1 and begun[:2] == [False, False], "begun twice, finished once"


def test_closing_forgets_it(cache: KVCache, checks: list[ShadowCheck]) -> None:
    cache.idle = IdleWork(3600.0)
    ask(cache)
    assert len(cache.idle) == 1
    cache.close()
    assert len(cache.idle) == 0 and not checks


def test_an_observer_that_fails_fails_nothing(cache: KVCache, caplog: pytest.LogCaptureFixture) -> None:
    def fail(check: ShadowCheck) -> None:
        raise RuntimeError("mine")

    cache._on_shadow = fail
    ask(cache)
    assert cache.idle.flush(30) and cache.stats().shadow_checks == 1
    assert "on_shadow failed" in caplog.text
