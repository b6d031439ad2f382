"""Sessions of the llama.cpp engine: decode, export, stage, commit, take, truncate, keep and reuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_splicing import TEXT, answer, export, fill, splice, text_logits

from cachegen_rag.errors import (
    ContextOverflowError,
    CorruptBitstreamError,
    ModelError,
    RequestCancelledError,
    SpliceRefusedError,
)
from cachegen_rag.models.base import Sampling
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.models.llama_native import FIRST_KEPT, SCRATCH, NativeContext

both = pytest.mark.parametrize(
    "model", ["tiny_model", pytest.param("real_model", marks=pytest.mark.real)], indirect=True
)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(getattr(request, "param", "tiny_model"))


@pytest.fixture
def prompt(model: Any) -> tuple[list[int], list[int], list[int]]:
    """Prefix, document and question."""
    prefix = model.tokenize("<|im_start|>system\nuse only the context<|im_end|>\n", special=True)
    return (
        prefix,
        model.tokenize(TEXT * (4 if model.name.startswith("tiny") else 2)),
        model.tokenize("question: who is the king?"),
    )


@both
def test_spliced_equals_text_to_the_bit(model: Any, prompt: tuple[list[int], ...]) -> None:
    prefix, document, question = prompt
    expected = text_logits(model, prefix, document, question)
    kv = export(model, prefix, document)
    assert np.isfinite(expected).all() and kv.token_ids.tolist() == document
    with model.session() as session:
        session.decode(prefix)
        splice(session, kv, len(prefix))
        assert session.token_ids == prefix + document
        logits = session.decode(question, logits=True)
    np.testing.assert_array_equal(logits, expected)


def test_splice_depends_on_the_rows(model: Any, prompt: tuple[list[int], ...]) -> None:
    prefix, document, question = prompt
    expected = text_logits(model, prefix, document, question)
    kv = export(model, prefix, document)
    kv.values[...] = np.roll(kv.values, 7, axis=1)
    with model.session() as session:
        session.decode(prefix)
        splice(session, kv, len(prefix))
        assert np.abs(session.decode(question, logits=True) - expected).max() > 0.1


@both
def test_restored_five_times_over(model: Any, prompt: tuple[list[int], ...]) -> None:
    prefix, document, question = prompt
    kv = export(model, prefix, document)
    answers = []
    for _ in range(5):
        with model.session() as session:
            session.decode(prefix)
            splice(session, kv, len(prefix))
            session.decode(question)
            answers.append(answer(session, max_tokens=8))
    with model.session() as session:
        for segment in prompt:
            session.decode(segment)
        assert answers == [answer(session, max_tokens=8)] * 5


def test_export_removes_the_position(tiny_model: Any) -> None:
    """Layer 0 does not depend on what came before, so its keys are equal wherever the document was computed."""
    document = tiny_model.tokenize(TEXT)
    near = export(tiny_model, [5], document)
    far = export(tiny_model, tiny_model.tokenize(TEXT * 40), document)
    np.testing.assert_allclose(near.keys[0], far.keys[0], atol=4e-3)
    np.testing.assert_array_equal(near.values[0], far.values[0])
    assert np.abs(near.values[1].astype(np.float32) - far.values[1]).max() > 0.01
    assert near.positions.tolist() == list(range(len(document)))


@both
def test_staged_in_parts_and_taken_in_runs(model: Any, prompt: tuple[list[int], ...]) -> None:
    """Commits accumulate in any order; runs between may be decoded instead of taken."""
    prefix, document, question = prompt
    expected = text_logits(model, prefix, document, question)
    kv, start, size = export(model, prefix, document), len(prefix), len(document)
    middle = size // 2
    with model.session() as session:
        for part in (kv[middle:], kv[:middle]):
            target = session.stage(part.positions + np.int32(start))
            fill(target, part)
            session.commit(target)
        session.decode(prefix)
        session.decode(document[:3])
        session.take(start + 3, start + middle, document[3:middle])
        session.take(start + middle, start + size - 5, document[middle:-5])
        session.decode(document[-5:])
        logits = session.decode(question, logits=True)
    tolerance = 2e-2 if model.name.startswith("tiny") else 2.0  # Q4_1 amplifies the order of cells
    np.testing.assert_allclose(logits, expected, atol=tolerance)


def test_committed_again_replaces(tiny_model: Any) -> None:
    prefix, document, question = [1, 2, 3], tiny_model.tokenize(TEXT), [9, 8]
    kv = export(tiny_model, prefix, document)
    expected = text_logits(tiny_model, prefix, document, question)
    with tiny_model.session() as session:
        wrong = session.stage(kv.positions + np.int32(3))
        for rows in [*wrong.keys, *wrong.values]:
            rows[...] = 1.0
        session.commit(wrong)
        session.decode(prefix)
        splice(session, kv, 3)
        np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=2e-2)


def test_gaps_are_legal_but_not_at_the_end(tiny_model: Any) -> None:
    prefix, document = [1, 2, 3], tiny_model.tokenize(TEXT * 2)
    kv = export(tiny_model, prefix, document)
    kept = [i for i in range(len(document)) if i % 3 == 0 or i == len(document) - 1]
    pruned = type(kv)(kv.keys[:, kept], kv.values[:, kept], kv.token_ids[kept], kv.positions[kept])
    with tiny_model.session() as session:
        session.decode(prefix)
        splice(session, pruned, 3)
        assert session.length == 3 + len(document)
        assert np.isfinite(session.decode([7], logits=True)).all()
        back = session.export(3, 3 + len(document))
        assert back.positions.tolist() == kept
        np.testing.assert_allclose(back.keys, pruned.keys, atol=4e-3)
        np.testing.assert_array_equal(back.values, pruned.values)
        session.truncate(5)  # its last position, 4, was pruned
        with pytest.raises(SpliceRefusedError, match="lacks the row of its last position, 4"):
            session.decode([7])
    with tiny_model.session() as session:
        session.decode(prefix)
        target = session.stage(pruned[:-1].positions + np.int32(3))
        fill(target, pruned[:-1])
        session.commit(target)
        with pytest.raises(SpliceRefusedError, match="no row for position"):
            session.take(3, 3 + len(document), document)


def test_wrong_takes_and_commits(tiny_model: Any) -> None:
    kv = export(tiny_model, [1, 2], [3, 4, 5])
    with tiny_model.session() as session:
        session.decode([1, 2])
        target = session.stage(kv.positions + np.int32(2))
        fill(target, kv)
        with pytest.raises(ModelError, match="whole target"):
            session.commit(target.rows(0, 2))
        with pytest.raises(SpliceRefusedError, match="no row"):
            session.take(2, 5, [3, 4, 5])
        session.commit(target)
        for start, stop, ids in ((1, 3, [3, 4]), (3, 5, [4, 5]), (2, 4, [3]), (2, 1, [])):
            with pytest.raises(ModelError, match="must begin at the prompt's end"):
                session.take(start, stop, ids)
        session.take(2, 2, [])
        assert session.length == 2
        for positions in ([1, 1], [3, 2], [-1, 0]):
            with pytest.raises(ModelError, match="increasing"):
                session.stage(np.array(positions, np.int32))
        with pytest.raises(ContextOverflowError, match="2048"):
            session.stage(np.array([2047, 2048], np.int32))
        session.commit(session.stage(np.array([], np.int32)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_refused(tiny_model: Any, value: float) -> None:
    expected = text_logits(tiny_model, [1, 2], [3, 4])
    with tiny_model.session() as session:
        target = session.stage(np.arange(4, dtype=np.int32))
        for rows in [*target.keys, *target.values]:
            rows[...] = 0
        target.values[2][1, 0, 3] = value
        with pytest.raises(CorruptBitstreamError, match="layer 2"):
            session.commit(target)
        session.decode([1, 2])
        np.testing.assert_array_equal(session.decode([3, 4], logits=True), expected)


@both
def test_damaged_rows_then_a_clean_prompt(model: Any, prompt: tuple[list[int], ...]) -> None:
    prefix, document, question = prompt
    expected = text_logits(model, prefix, document, question)
    random = np.random.default_rng(0)
    with model.session() as session:
        target = session.stage(np.arange(300, dtype=np.int32))
        for rows in [*target.keys, *target.values]:
            rows[...] = random.standard_normal(rows.shape) * 1000
        session.commit(target)
        session.take(0, 300, [1] * 300)
        session.decode(question)
    np.testing.assert_array_equal(text_logits(model, prefix, document, question), expected)


@pytest.mark.parametrize("keep", [0, 3, 15, 100, -1])
def test_truncated_state_then_a_clean_prompt(tiny_model: Any, keep: int) -> None:
    expected = text_logits(tiny_model, [1, 2], [3, 4])
    with tiny_model.session() as session:
        session.decode([5, 6, 7])
        data = tiny_model.context.get_sequence(0)
        assert not tiny_model.context.set_sequence(SCRATCH, data[:keep].copy())
        assert tiny_model.context.last_position(SCRATCH) == -1
    np.testing.assert_array_equal(text_logits(tiny_model, [1, 2], [3, 4]), expected)


def test_batches_smaller_than_the_document(tiny_gguf: Path, tiny_model: Any) -> None:
    ids = tiny_model.tokenize(TEXT * 6)
    small = LlamaCppModel(tiny_gguf, n_ctx=512, n_threads=1, n_batch=16)
    try:
        np.testing.assert_allclose(text_logits(small, ids), text_logits(tiny_model, ids), atol=2e-2)
        one, other = export(small, [1], ids), export(tiny_model, [1], ids)
        np.testing.assert_allclose(one.keys, other.keys, atol=2e-2)
    finally:
        small.close()


def test_context_overflow_before_any_compute(tiny_gguf: Path) -> None:
    with LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1) as model, model.session() as session:
        session.decode(list(range(10)))
        start = time.perf_counter()
        with pytest.raises(ContextOverflowError, match=r"10 tokens of prompt and 55 more are 65; the context holds 64"):
            session.decode([1] * 55)
        assert session.length == 10 and time.perf_counter() - start < 1
        session.decode([1] * 54)
        assert session.length == 64


def test_library_rows_give_way_when_the_cache_is_full(tiny_gguf: Path) -> None:
    """Everything staged and everything recomputed is more than the cache has cells: passed rows are dropped."""
    with LlamaCppModel(tiny_gguf, n_ctx=512, n_threads=1, keep_tokens=0) as model:
        ids = [i % 256 for i in range(500)]
        expected = text_logits(model, ids[:496], ids[496:])
        kv = export(model, ids[:1], ids[1:])
        with model.session() as session:
            target = session.stage(kv.positions + np.int32(1))
            fill(target, kv)
            session.commit(target)
            for at in range(0, 480, 16):
                session.decode(ids[at : at + 16])
            session.take(480, 496, ids[480:496])
            np.testing.assert_allclose(session.decode(ids[496:], logits=True), expected, atol=2e-2)
            session.truncate(100)
            with pytest.raises(SpliceRefusedError, match="dropped to make room"):
                session.take(100, 499, ids[100:499])


def test_truncate_then_other_text(model: Any, prompt: tuple[list[int], ...]) -> None:
    prefix, document, question = prompt
    expected = text_logits(model, prefix, question)
    with model.session() as session:
        session.decode(prefix + document)
        session.truncate(len(prefix))
        assert session.token_ids == prefix
        np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=2e-2)
        with pytest.raises(ModelError, match="cannot truncate"):
            session.truncate(10_000)


def test_truncate_leaves_the_library(tiny_model: Any) -> None:
    prefix, document, question = [1, 2, 3], tiny_model.tokenize(TEXT), [9, 8]
    expected = text_logits(tiny_model, prefix, document, question)
    kv = export(tiny_model, prefix, document)
    with tiny_model.session() as session:
        session.decode(prefix)
        splice(session, kv, 3)
        session.decode(question)
        session.truncate(3)
        session.take(3, 3 + len(document), document)
        np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=1e-3)


@both
def test_kept_run_begins_the_next_prompt(model: Any, prompt: tuple[list[int], ...]) -> None:
    prefix, document, question = prompt
    with model.session() as session:
        session.decode(prefix)
        assert session.keep()
        expected = session.decode(question, logits=True)
        session.truncate(len(prefix))
    for _ in range(2):
        with model.session() as session:
            assert session.reuse(prefix + question) == len(prefix)
            assert session.token_ids == prefix
            np.testing.assert_array_equal(session.decode(question, logits=True), expected)
            with pytest.raises(ModelError, match="reuse begins a prompt"):
                session.reuse(prefix)
    with model.session() as session:
        assert session.reuse([*prefix[:5], *document]) == 5
        session.decode(document)
        tolerance = 2e-2 if model.name.startswith("tiny") else 2.0
        logits = session.decode(question, logits=True)
    np.testing.assert_allclose(logits, text_logits(model, prefix[:5], document, question), atol=tolerance)


def test_kept_runs_are_bounded_and_least_recent_goes(tiny_gguf: Path) -> None:
    with LlamaCppModel(tiny_gguf, n_ctx=256, n_threads=1, keep_tokens=100) as model:

        def keep(ids: list[int]) -> bool:
            with model.session() as session:
                session.decode(ids)
                return session.keep()

        def kept(ids: list[int]) -> int:
            with model.session() as session:
                return session.reuse(ids)

        a, b, c = [1] * 30, [2] * 40, [3] * 50
        assert keep(a) and keep(b) and kept(a) == 30
        assert not keep([4] * 101) and kept(b) == 40
        assert kept(a) == 30 and keep(c)
        assert (kept(a), kept(b), kept(c)) == (30, 0, 50)
        assert keep([*a, 9]) and kept([*a, 9, 9]) == 31
        assert model.kept.tokens <= 100


def test_only_computed_tokens_are_kept(tiny_model: Any) -> None:
    kv = export(tiny_model, [1, 2], [3, 4, 5])
    with tiny_model.session() as session:
        session.decode([1, 2])
        splice(session, kv, 2)
        session.decode([6])
        assert session.keep(2)
        with pytest.raises(ModelError, match="2 leading tokens that were computed"):
            session.keep(3)


def test_a_failed_session_leaves_nothing(tiny_model: Any) -> None:
    expected = text_logits(tiny_model, [1, 2], [3, 4])

    def fail() -> None:
        with tiny_model.session() as session:
            session.decode([200] * 50)
            session.keep()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    with tiny_model.session() as session:
        assert session.reuse([200] * 50) == 0
    np.testing.assert_array_equal(text_logits(tiny_model, [1, 2], [3, 4]), expected)


def test_closed_and_nested_sessions(tiny_model: Any) -> None:
    with tiny_model.session() as session:
        session.decode([1])
        with pytest.raises(ModelError, match="already has a session"), tiny_model.session():
            pass
        stream = session.generate(Sampling(max_tokens=8))
        next(stream)
    for call in (lambda: session.decode([1]), lambda: session.take(1, 2, [1]), lambda: next(stream)):
        with pytest.raises(ModelError, match="closed"):
            call()
    with tiny_model.session() as session:
        session.decode([1])


def test_tokens_outside_the_vocabulary(tiny_model: Any) -> None:
    with tiny_model.session() as session:
        for ids in ([1, -1], [tiny_model.n_vocab]):
            with pytest.raises(ModelError, match="not in the vocabulary"):
                session.decode(ids)
        assert session.decode([], logits=True).shape == (0, tiny_model.n_vocab)
        assert session.decode([]) is None and session.length == 0


def test_export_outside_the_prompt(tiny_model: Any) -> None:
    with tiny_model.session() as session:
        session.decode([1, 2, 3])
        assert len(session.export(1, 1)) == 0
        for start, stop in ((-1, 2), (0, 4), (2, 1)):
            with pytest.raises(ModelError, match="outside the prompt"):
                session.export(start, stop)


def test_threads_are_served_in_order_and_alone(model: Any) -> None:
    prompts = [model.tokenize(f"{TEXT} number {i} ") for i in range(4)]

    def ask(ids: list[int]) -> str:
        with model.session() as session:
            session.decode(ids)
            return answer(session, max_tokens=6)

    expected = [ask(ids) for ids in prompts]
    order: list[int] = []
    answers: dict[int, str] = {}

    def worker(number: int) -> None:
        with model.session() as session:
            order.append(number)
            session.decode(prompts[number])
            answers[number] = answer(session, max_tokens=6)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
    with model.session():
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda n=number: len(model._turns._waiting) == n + 1)
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3]
    assert [answers[i] for i in range(4)] == expected


def test_an_abandoned_stream_frees_the_context(tiny_model: Any) -> None:
    def stream() -> Any:
        with tiny_model.session() as session:
            session.decode([1, 2, 3])
            yield from session.generate(Sampling(max_tokens=500))

    running = stream()
    next(running)
    waiting = threading.Thread(target=lambda: text_logits(tiny_model, [1], [2]))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    running.close()
    waiting.join(10)
    assert not waiting.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_cancelled_before_a_decode(tiny_model: Any) -> None:
    expected = text_logits(tiny_model, [1, 2], [3, 4])
    with tiny_model.session() as session:
        session.decode([1, 2])
        session.cancelled = lambda: True
        with pytest.raises(RequestCancelledError, match="after 2 tokens"):
            session.decode([7, 8])
        session.cancelled = lambda: False
        np.testing.assert_array_equal(session.decode([3, 4], logits=True), expected)


def test_cancelled_while_generating(tiny_model: Any) -> None:
    with tiny_model.session() as session:
        session.decode([1, 2])
        stream = session.generate(Sampling(max_tokens=50))
        next(stream)
        session.cancelled = lambda: True
        with pytest.raises(RequestCancelledError):
            next(stream)


@pytest.mark.real
def test_cancelled_during_a_long_prefill(real_model: Any) -> None:
    """512 tokens take seconds; the context is free, and clean, long before that."""
    prefix, ids = real_model.tokenize(TEXT), real_model.tokenize(TEXT * 40)[:512]
    with real_model.session() as session:
        session.decode(prefix)
        expected = session.decode([5, 6], logits=True)
    with real_model.session() as session:
        session.decode(prefix)
        started = time.monotonic()
        session.cancelled = lambda: time.monotonic() > started + 0.3
        with pytest.raises(RequestCancelledError, match="while 512 tokens were computed"):
            session.decode(ids)
        assert time.monotonic() - started < 2.0
        session.cancelled = None
        assert session.length == len(prefix)
        np.testing.assert_array_equal(session.decode([5, 6], logits=True), expected)


def test_kept_runs_move_to_the_first_cells(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run kept behind a long document must not make every later prompt attend to the document's empty cells."""
    restored: list[int] = []
    original = NativeContext.set_sequence
    monkeypatch.setattr(NativeContext, "set_sequence", lambda s, n, d: restored.append(n) or original(s, n, d))
    with LlamaCppModel(tiny_gguf, n_ctx=1024, n_threads=1) as model:
        prefix, question = model.tokenize(TEXT), [9, 8]
        kv = export(model, prefix, model.tokenize(TEXT * 30))
        with model.session() as session:
            target = session.stage(kv.positions + np.int32(len(prefix)))
            fill(target, kv)
            session.commit(target)
            session.decode(prefix)
            assert session.keep()
            expected = session.decode(question, logits=True)
        assert restored[-2:] == [SCRATCH, FIRST_KEPT]
        kept = model.context.get_sequence(FIRST_KEPT)
        with model.session() as session:
            assert session.reuse(prefix) == len(prefix)
            np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=2e-2)
            session.decode([1] * 500)
            session.truncate(0)
        assert model.context.get_sequence(FIRST_KEPT).tobytes() == kept.tobytes()
        count = len(restored)
        with model.session() as session:
            assert session.reuse(prefix) == len(prefix)
            assert session.keep(len(prefix))
        assert len(restored) == count  # nothing new was kept, so nothing moves
