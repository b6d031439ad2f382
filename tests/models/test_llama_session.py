"""Sessions of the llama.cpp engine, beyond what every engine does (``engine_conformance.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splicing import TEXT, export, fill, splice, text_logits

from cachegen_rag.errors import (
    ContextOverflowError,
    ModelError,
    RequestCancelledError,
    SpliceRefusedError,
)
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.models.llama_kept import KEPT_RUNS
from cachegen_rag.models.llama_native import FIRST_KEPT, SCRATCH, NativeContext


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
            session.truncate(1)
            target = session.stage(kv.positions + np.int32(1))  # staged again, it can be taken again
            fill(target, kv)
            session.commit(target)
            session.take(1, 496, ids[1:496])
            np.testing.assert_allclose(session.decode(ids[496:], logits=True), expected, atol=2e-2)


def test_staging_again_beside_a_full_prompt(tiny_gguf: Path) -> None:
    with LlamaCppModel(tiny_gguf, n_ctx=256, n_threads=1, keep_tokens=0) as model:
        ids = [i % 256 for i in range(250)]
        kv = export(model, ids[:1], ids[1:])
        with model.session() as session:
            session.decode(ids[:1])
            for _ in range(3):
                splice(session, kv, 1)
                session.truncate(1)
            splice(session, kv, 1)
            expected = session.decode([7], logits=True)
            session.truncate(250)
            target = session.stage(kv.positions[:200] + np.int32(1))
            fill(target, kv[:200])
            session.commit(target)
            np.testing.assert_allclose(session.decode([7], logits=True), expected, atol=2e-2)


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
        for token in range(KEPT_RUNS + 2):
            assert keep([100 + token] * 2)
        assert [kept([100 + token] * 2) for token in range(KEPT_RUNS + 2)] == [0, 0] + [2] * KEPT_RUNS


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


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


def test_a_part_of_a_target_is_not_committed(tiny_model: Any) -> None:
    with tiny_model.session() as session:
        target = session.stage(np.arange(5, dtype=np.int32))
        with pytest.raises(ModelError, match="whole target"):
            session.commit(target.rows(0, 2))


def test_nothing_continues_from_a_pruned_position(tiny_model: Any) -> None:
    """llama.cpp wants a batch to begin behind the sequence's last position."""
    kv = export(tiny_model, [1, 2, 3], tiny_model.tokenize(TEXT))
    kept = [0, len(kv) - 1]
    pruned = type(kv)(kv.keys[:, kept], kv.values[:, kept], kv.token_ids[kept], kv.positions[kept])
    with tiny_model.session() as session:
        session.decode([1, 2, 3])
        splice(session, pruned, 3)
        session.truncate(5)
        with pytest.raises(SpliceRefusedError, match="lacks the row of its last position, 4"):
            session.decode([7])


def test_a_failed_session_keeps_nothing(tiny_model: Any) -> None:
    def fail() -> None:
        with tiny_model.session() as session:
            session.decode([200] * 50)
            session.keep()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    with tiny_model.session() as session:
        assert session.reuse([200] * 50) == 0
