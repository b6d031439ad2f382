"""Exact runs: counting a request never waits for the lock, not even for this thread's own."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from cachegen_rag.exact import ExactRuns
from cachegen_rag.prefixes import PrefixLearner
from cachegen_rag.prompt import Prompt, Segment

PROMPT = Prompt((Segment("text", (1, 2, 3)), Segment("document", tuple(range(10, 40))), Segment("text", (5,))))


def runs() -> ExactRuns:
    shape = SimpleNamespace(elements_per_token=8)
    codec = SimpleNamespace(profile=SimpleNamespace(shape=shape), bits_per_element=lambda level: 1.0)
    return ExactRuns(SimpleNamespace(codec=codec), 1 << 20, 1)  # type: ignore[arg-type]


def test_a_stream_that_ends_inside_of_the_lock_is_counted(monkeypatch):
    """The garbage collector may end a stream that nobody reads any more at any allocation, also under the lock."""
    exact, learn, inside = runs(), PrefixLearner.observe, []

    def observe(learner: PrefixLearner, prompt: Prompt) -> None:
        if not inside:
            inside.append(True)
            exact.observe(prompt)
            exact.observe(prompt)
        learn(learner, prompt)

    monkeypatch.setattr(PrefixLearner, "observe", observe)
    thread = threading.Thread(target=exact.observe, args=(PROMPT,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and exact.pending == 1


def test_what_was_seen_while_another_has_the_lock_is_counted_later():
    exact = runs()
    with exact._lock:
        thread = threading.Thread(target=lambda: [exact.observe(PROMPT) for _ in range(3)], daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert exact.pending == 1
