"""One suite for every model engine: a class that each engine's tests subclass.

``SpliceConformance`` is what splicing rests on, short enough for a real model; ``EngineConformance`` is the whole of
``cachegen_rag.models.base``. Both want a fixture ``engine`` that gives an open model of at least 1,024 tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from splicing import TEXT, answer, export, fill, splice, text_logits

from cachegen_rag.errors import (
    ContextOverflowError,
    CorruptBitstreamError,
    ModelError,
    RequestCancelledError,
    SpliceRefusedError,
)
from cachegen_rag.models.base import Sampling, Token
from cachegen_rag.rope import RopeSpec, rotate

PREFIX, QUESTION = [1, 2, 3], [9, 8]


def generate(engine: Any, ids: list[int], **sampling: Any) -> list[Token]:
    with engine.session() as session:
        session.decode(ids)
        return list(session.generate(Sampling(**{"max_tokens": 16, **sampling})))


def text(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


class SpliceConformance:
    """What splicing rests on."""

    exact = 0.0  # logits of the same batches, spliced and computed
    rounding = 2e-2  # logits of the same tokens in other batches, or with the cache's rows in another order
    repeats = 4  # of the text that makes a document

    @pytest.fixture
    def engine(self) -> Any:
        raise NotImplementedError("a subclass provides an open model")

    @pytest.fixture
    def prompt(self, engine: Any) -> tuple[list[int], list[int], list[int]]:
        """Prefix, document and question."""
        prefix = engine.tokenize("<|im_start|>system\nuse only the context<|im_end|>\n", special=True)
        return prefix, engine.tokenize(TEXT * self.repeats), engine.tokenize("question: who is the king?")

    def test_spliced_equals_text(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        prefix, document, question = prompt
        expected = text_logits(engine, prefix, document, question)
        kv = export(engine, prefix, document)
        assert np.isfinite(expected).all() and kv.token_ids.tolist() == document
        with engine.session() as session:
            session.decode(prefix)
            splice(session, kv, len(prefix))
            assert session.token_ids == prefix + document
            logits = session.decode(question, logits=True)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=self.exact)

    def test_splice_depends_on_the_rows(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        prefix, document, question = prompt
        expected = text_logits(engine, prefix, document, question)
        kv = export(engine, prefix, document)
        kv.values[...] = np.roll(kv.values, 7, axis=1)
        with engine.session() as session:
            session.decode(prefix)
            splice(session, kv, len(prefix))
            assert np.abs(session.decode(question, logits=True) - expected).max() > 0.1

    def test_restored_five_times_over(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        prefix, document, question = prompt
        kv = export(engine, prefix, document)
        answers = []
        for _ in range(5):
            with engine.session() as session:
                session.decode(prefix)
                splice(session, kv, len(prefix))
                session.decode(question)
                answers.append(answer(session, max_tokens=8))
        with engine.session() as session:
            for segment in prompt:
                session.decode(segment)
            assert answers == [answer(session, max_tokens=8)] * 5

    def test_staged_in_parts_and_taken_in_runs(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        """Commits accumulate in any order; runs between may be decoded instead of taken."""
        prefix, document, question = prompt
        expected = text_logits(engine, prefix, document, question)
        kv, start, size = export(engine, prefix, document), len(prefix), len(document)
        middle = size // 2
        with engine.session() as session:
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
        np.testing.assert_allclose(logits, expected, atol=self.rounding)

    def test_gaps_are_computed_afterwards(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        """Tokens skipped at first, computed one after the other, end as if decoded in their place."""
        prefix, document, question = prompt
        expected = text_logits(engine, prefix, document, question)
        kv, start, size = export(engine, prefix, document), len(prefix), len(document)
        runs = [(start, start + 2), (start + size // 2, start + size // 2 + 3)]
        with engine.session() as session:
            target = session.stage(kv.positions + np.int32(start))
            fill(target, kv)
            session.commit(target)
            session.decode(prefix)
            at = start
            for first, last in runs:
                session.take(at, first, document[at - start : first - start])
                session.skip(document[first - start : last - start])
                at = last
            session.take(at, start + size, document[at - start :])
            assert session.token_ids == prefix + document
            for run in runs:
                session.recompute([run])
            logits = session.decode(question, logits=True)
        np.testing.assert_allclose(logits, expected, atol=self.rounding)

    def test_recomputed_rows_replace_the_ones_before(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        """In one call, what stands before a run being right, it becomes right itself, whatever it was."""
        prefix, document, question = prompt
        expected = text_logits(engine, prefix, document, question)
        kv, start, size = export(engine, prefix, document), len(prefix), len(document)
        runs = [(start + 1, start + 4), (start + size - 3, start + size)]
        for rows in (slice(*runs[0]), slice(*runs[1])):
            kv.values[:, rows.start - start : rows.stop - start] += 1.0
        with engine.session() as session:
            session.decode(prefix)
            splice(session, kv, start)
            session.recompute(runs[:1])
            session.recompute(runs[1:])
            assert session.length == start + size
            logits = session.decode(question, logits=True)
        np.testing.assert_allclose(logits, expected, atol=self.rounding)

    def test_attending_sees_the_whole_prompt(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        """Queries and keys of the layers asked for, rotated alike: their products are those without rotation."""
        prefix, document, question = prompt
        ids = prefix + document
        with engine.session() as session:
            session.decode(ids)
            seen = session.attend(question, range(1, 3))
            assert session.token_ids == ids + question
            kv = session.export(0, session.length)
        with engine.session() as session:
            session.decode(ids)
            _, queries = session.decode_with_queries(question)
        order = np.argsort(seen.positions)
        assert seen.positions[order].tolist() == list(range(len(ids) + len(question)))
        here = np.arange(len(ids), len(ids) + len(question), dtype=np.int32)
        plain = RopeSpec(engine.rope.inv_freq, "interleaved")
        for n, layer in enumerate((1, 2)):
            q, k = rotate(queries[layer], here, plain), rotate(kv.keys[layer], kv.positions, plain)
            group = q.shape[1] // k.shape[1]
            for head in range(q.shape[1]):
                wanted = q[:, head] @ k[:, head // group].T
                got = seen.queries[n, :, head] @ seen.keys[n][order, head // group].T
                np.testing.assert_allclose(got, wanted, atol=2e-2 * np.abs(wanted).max())

    def test_a_stored_run_longer_than_what_is_taken(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        """Rows behind the last one taken lie at the question's positions and must not be seen by it."""
        prefix, document, question = prompt
        shorter = document[: len(document) // 2]
        expected = text_logits(engine, prefix, shorter, question)
        kv, start = export(engine, prefix, document), len(prefix)
        with engine.session() as session:
            session.decode(prefix)
            target = session.stage(kv.positions + np.int32(start))
            fill(target, kv)
            session.commit(target)
            session.take(start, start + len(shorter), shorter)
            np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=self.rounding)

    def test_damaged_rows_then_a_clean_prompt(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        prefix, document, question = prompt
        expected = text_logits(engine, prefix, document, question)
        random = np.random.default_rng(0)
        with engine.session() as session:
            target = session.stage(np.arange(300, dtype=np.int32))
            for rows in [*target.keys, *target.values]:
                rows[...] = random.standard_normal(rows.shape) * 1000
            session.commit(target)
            session.take(0, 300, [1] * 300)
            session.decode(question)
        again = text_logits(engine, prefix, document, question)
        np.testing.assert_allclose(again, expected, rtol=0, atol=self.exact)

    def test_nothing_is_computed_beyond_the_context(self, engine: Any) -> None:
        with engine.session() as session:
            session.decode([1, 2, 3])
            with pytest.raises(ContextOverflowError, match=str(engine.n_ctx)):
                session.decode([1] * (engine.n_ctx - 2))
            assert session.length == 3
            session.decode([1])

    def test_truncate_then_other_text(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        prefix, document, question = prompt
        expected = text_logits(engine, prefix, question)
        with engine.session() as session:
            session.decode(prefix + document)
            session.truncate(len(prefix))
            assert session.token_ids == prefix
            np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=self.rounding)
            with pytest.raises(ModelError, match="cannot truncate"):
                session.truncate(10_000)

    def test_kept_run_begins_the_next_prompt(self, engine: Any, prompt: tuple[list[int], ...]) -> None:
        prefix, document, question = prompt
        with engine.session() as session:
            session.decode(prefix)
            assert session.keep()
            expected = session.decode(question, logits=True)
            session.truncate(len(prefix))
        for _ in range(2):
            with engine.session() as session:
                assert session.reuse(prefix + question) == len(prefix)
                assert session.token_ids == prefix
                logits = session.decode(question, logits=True)
                np.testing.assert_allclose(logits, expected, rtol=0, atol=self.exact)
                with pytest.raises(ModelError, match="reuse begins a prompt"):
                    session.reuse(prefix)
        with engine.session() as session:
            assert session.reuse([*prefix[:5], *document]) == 5
            session.decode(document)
            logits = session.decode(question, logits=True)
        np.testing.assert_allclose(logits, text_logits(engine, prefix[:5], document, question), atol=self.rounding)

    def test_threads_are_served_in_order_and_alone(self, engine: Any) -> None:
        prompts = [engine.tokenize(f"{TEXT} number {i} ") for i in range(4)]

        def ask(ids: list[int]) -> str:
            with engine.session() as session:
                session.decode(ids)
                return answer(session, max_tokens=6)

        expected = [ask(ids) for ids in prompts]
        order: list[int] = []
        answers: dict[int, str] = {}

        def worker(number: int) -> None:
            with engine.session() as session:
                order.append(number)
                session.decode(prompts[number])
                answers[number] = answer(session, max_tokens=6)

        threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
        with engine.session():
            for number, thread in enumerate(threads):
                thread.start()
                wait_until(lambda n=number: len(engine._turns._waiting) == n + 1)
        for thread in threads:
            thread.join(60)
        assert order == [0, 1, 2, 3]
        assert [answers[i] for i in range(4)] == expected


class EngineConformance(SpliceConformance):
    """All that the protocols promise."""

    def test_export_removes_the_position(self, engine: Any) -> None:
        """Layer 0 does not depend on what came before, so its keys are equal wherever the document was computed."""
        document = engine.tokenize(TEXT)
        near = export(engine, [5], document)
        far = export(engine, engine.tokenize(TEXT * 40), document)
        np.testing.assert_allclose(near.keys[0], far.keys[0], atol=4e-3)
        np.testing.assert_array_equal(near.values[0], far.values[0])
        assert np.abs(near.values[1].astype(np.float32) - far.values[1]).max() > 0.01
        assert near.positions.tolist() == list(range(len(document)))

    def test_committed_again_replaces(self, engine: Any) -> None:
        prefix, document, question = [1, 2, 3], engine.tokenize(TEXT), [9, 8]
        kv = export(engine, prefix, document)
        expected = text_logits(engine, prefix, document, question)
        with engine.session() as session:
            wrong = session.stage(kv.positions + np.int32(3))
            for rows in [*wrong.keys, *wrong.values]:
                rows[...] = 1.0
            session.commit(wrong)
            session.decode(prefix)
            splice(session, kv, 3)
            np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=self.rounding)

    def test_gaps_are_legal_but_not_at_the_end(self, engine: Any) -> None:
        prefix, document = [1, 2, 3], engine.tokenize(TEXT * 2)
        kv = export(engine, prefix, document)
        kept = [i for i in range(len(document)) if i % 3 == 0 or i == len(document) - 1]
        pruned = type(kv)(kv.keys[:, kept], kv.values[:, kept], kv.token_ids[kept], kv.positions[kept])
        with engine.session() as session:
            session.decode(prefix)
            splice(session, pruned, 3)
            assert session.length == 3 + len(document)
            assert np.isfinite(session.decode([7], logits=True)).all()
            back = session.export(3, 3 + len(document))
            assert back.positions.tolist() == kept
            np.testing.assert_allclose(back.keys, pruned.keys, atol=4e-3)
            np.testing.assert_array_equal(back.values, pruned.values)
        with engine.session() as session:
            session.decode(prefix)
            target = session.stage(pruned[:-1].positions + np.int32(3))
            fill(target, pruned[:-1])
            session.commit(target)
            with pytest.raises(SpliceRefusedError, match="no row for position"):
                session.take(3, 3 + len(document), document)

    def test_wrong_takes_and_commits(self, engine: Any) -> None:
        kv = export(engine, [1, 2], [3, 4, 5])
        with engine.session() as session:
            session.decode([1, 2])
            target = session.stage(kv.positions + np.int32(2))
            fill(target, kv)
            with pytest.raises(SpliceRefusedError, match="no row"):
                session.take(2, 5, [3, 4, 5])
            session.commit(target)
            for start, stop, ids in ((1, 3, [3, 4]), (3, 5, [4, 5]), (2, 4, [3]), (2, 1, [])):
                with pytest.raises(ModelError, match="prompt"):
                    session.take(start, stop, ids)
            session.take(2, 2, [])
            assert session.length == 2
            for positions in ([1, 1], [3, 2], [-1, 0]):
                with pytest.raises(ModelError, match="increasing"):
                    session.stage(np.array(positions, np.int32))
            with pytest.raises(ContextOverflowError, match=str(engine.n_ctx)):
                session.stage(np.array([engine.n_ctx - 1, engine.n_ctx], np.int32))
            session.commit(session.stage(np.array([], np.int32)))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_rows_that_are_not_finite_are_refused(self, engine: Any, value: float) -> None:
        expected = text_logits(engine, [1, 2], [3, 4])
        with engine.session() as session:
            target = session.stage(np.arange(4, dtype=np.int32))
            for rows in [*target.keys, *target.values]:
                rows[...] = 0
            target.values[2][1, 0, 3] = value
            with pytest.raises(CorruptBitstreamError, match="layer 2"):
                session.commit(target)
            session.decode([1, 2])
            logits = session.decode([3, 4], logits=True)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=self.exact)

    @pytest.mark.parametrize(
        "runs", [[(3, 3)], [(4, 2)], [(2, 4), (3, 5)], [(4, 6), (0, 2)], [(5, 9)], [(-1, 2)]], ids=str
    )
    def test_runs_that_are_none(self, engine: Any, runs: list[tuple[int, int]]) -> None:
        with engine.session() as session:
            session.decode([1, 2, 3, 4, 5, 6])
            before = session.decode([7], logits=True)
            with pytest.raises(ModelError, match="run"):
                session.recompute(runs)
            session.truncate(6)
            np.testing.assert_allclose(session.decode([7], logits=True), before, atol=self.rounding)

    def test_many_runs_longer_than_a_batch(self, engine: Any) -> None:
        """More runs than fit one call, and runs longer than a batch: all of the prompt, over rows that are right."""
        ids = (engine.tokenize(TEXT) * 50)[:700]
        with engine.session() as session:
            session.decode(ids)
            expected = session.decode([9, 8], logits=True)
        for runs in ([(n, n + 3) for n in range(0, 700, 7)], [(0, 690)], [(0, 300), (300, 699)]):
            with engine.session() as session:
                session.decode(ids)
                session.recompute(runs)
                np.testing.assert_allclose(session.decode([9, 8], logits=True), expected, atol=2 * self.rounding)

    def test_recompute_is_cancelled(self, engine: Any) -> None:
        with engine.session() as session:
            session.decode([1, 2, 3, 4])
            expected = session.decode([5], logits=True)
            session.truncate(4)
            session.cancelled = lambda: True

            def recompute() -> None:
                session.recompute([(1, 3)])
                session.decode([5], logits=True)  # an engine may wait until something depends on it

            with pytest.raises(RequestCancelledError):
                recompute()
            session.cancelled = None
            np.testing.assert_allclose(session.decode([5], logits=True), expected, atol=self.rounding)

    def test_truncate_leaves_the_library(self, engine: Any) -> None:
        prefix, document, question = [1, 2, 3], engine.tokenize(TEXT), [9, 8]
        expected = text_logits(engine, prefix, document, question)
        kv = export(engine, prefix, document)
        with engine.session() as session:
            session.decode(prefix)
            splice(session, kv, 3)
            session.decode(question)
            session.truncate(3)
            session.take(3, 3 + len(document), document)
            np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=self.rounding)

    def test_only_computed_tokens_are_kept(self, engine: Any) -> None:
        kv = export(engine, [1, 2], [3, 4, 5])
        with engine.session() as session:
            session.decode([1, 2])
            splice(session, kv, 2)
            session.decode([6])
            assert session.keep(2)
            with pytest.raises(ModelError, match="2 leading tokens that were computed"):
                session.keep(3)

    def test_a_failed_session_leaves_nothing(self, engine: Any) -> None:
        expected = text_logits(engine, [1, 2], [3, 4])

        def fail() -> None:
            with engine.session() as session:
                session.decode([200] * 50)
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            fail()
        np.testing.assert_allclose(text_logits(engine, [1, 2], [3, 4]), expected, rtol=0, atol=self.exact)

    def test_closed_and_nested_sessions(self, engine: Any) -> None:
        with engine.session() as session:
            session.decode([1])
            with pytest.raises(ModelError, match="session"), engine.session():
                pass
            stream = session.generate(Sampling(max_tokens=8))
            next(stream)
        for call in (lambda: session.decode([1]), lambda: session.take(1, 2, [1]), lambda: next(stream)):
            with pytest.raises(ModelError, match="session"):
                call()
        with engine.session() as session:
            session.decode([1])

    def test_tokens_outside_the_vocabulary(self, engine: Any) -> None:
        with engine.session() as session:
            vocabulary = session.decode([], logits=True).shape[1]
            for ids in ([1, -1], [vocabulary]):
                with pytest.raises(ModelError, match="not in the vocabulary"):
                    session.decode(ids)
            assert session.decode([]) is None and session.length == 0

    def test_export_outside_the_prompt(self, engine: Any) -> None:
        with engine.session() as session:
            session.decode([1, 2, 3])
            assert len(session.export(1, 1)) == 0
            for start, stop in ((-1, 2), (0, 4), (2, 1)):
                with pytest.raises(ModelError, match="prompt"):
                    session.export(start, stop)

    def test_an_abandoned_stream_frees_the_context(self, engine: Any) -> None:
        def stream() -> Any:
            with engine.session() as session:
                session.decode([1, 2, 3])
                yield from session.generate(Sampling(max_tokens=500))

        running = stream()
        next(running)
        waiting = threading.Thread(target=lambda: text_logits(engine, [1], [2]))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        running.close()
        waiting.join(10)
        assert not waiting.is_alive()

    def test_cancelled_before_a_decode(self, engine: Any) -> None:
        expected = text_logits(engine, [1, 2], [3, 4])
        with engine.session() as session:
            session.decode([1, 2])
            session.cancelled = lambda: True
            with pytest.raises(RequestCancelledError, match="cancelled"):
                session.decode([7, 8])
            session.cancelled = lambda: False
            logits = session.decode([3, 4], logits=True)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=self.exact)

    def test_cancelled_while_generating(self, engine: Any) -> None:
        with engine.session() as session:
            session.decode([1, 2])
            stream = session.generate(Sampling(max_tokens=50))
            next(stream)
            session.cancelled = lambda: True
            with pytest.raises(RequestCancelledError):
                next(stream)

    def test_greedy_takes_the_likeliest_token(self, engine: Any) -> None:
        ids = engine.tokenize(TEXT)
        tokens = generate(engine, ids, max_tokens=6)
        with engine.session() as session:
            session.decode(ids)
            assert session.length == len(ids)
            for token in session.generate(Sampling(max_tokens=6)):
                ids.append(token.id)
        with engine.session() as session:
            logits = session.decode(ids, logits=True)
        assert np.argmax(logits[-7:-1], axis=1).tolist() == [token.id for token in tokens]
        assert [token.finish_reason for token in tokens] == [None] * 5 + ["length"]

    def test_seeds(self, engine: Any) -> None:
        ids = engine.tokenize(TEXT)
        hot = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 6}
        one, same = (text(generate(engine, ids, seed=5, **hot)) for _ in range(2))
        assert one == same
        assert len({text(generate(engine, ids, seed=seed, **hot)) for seed in range(4)}) > 2
        assert len({text(generate(engine, ids, seed=None, **hot)) for _ in range(4)}) > 2
        assert text(generate(engine, ids, seed=-1, **hot)) == text(generate(engine, ids, seed=-1, **hot))

    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-4}])
    def test_narrow_sampling_is_greedy(self, engine: Any, narrow: dict[str, Any]) -> None:
        ids = engine.tokenize(TEXT)
        wide = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
        assert text(generate(engine, ids, **{**wide, **narrow})) == text(generate(engine, ids))

    @pytest.mark.parametrize(
        "penalty",
        [{"repeat_penalty": 1.8}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.5}],
        ids=lambda p: next(iter(p)),
    )
    def test_penalties_see_spliced_tokens(self, engine: Any, penalty: dict[str, float]) -> None:
        """A document of the very tokens that would be generated: only a penalty that saw them avoids them."""
        document = engine.tokenize(TEXT)
        favoured = [token.id for token in generate(engine, PREFIX + document + QUESTION)]
        document = document + favoured * 2
        kv = export(engine, PREFIX, document)
        sampling = Sampling(max_tokens=8, repeat_last_n=-1, **penalty)
        with engine.session() as session:
            session.decode(PREFIX)
            session.decode(document)
            session.decode(QUESTION)
            expected = [token.id for token in session.generate(sampling)]
        with engine.session() as session:
            session.decode(PREFIX)
            splice(session, kv, len(PREFIX))
            session.decode(QUESTION)
            assert [token.id for token in session.generate(sampling)] == expected
            session.truncate(len(PREFIX) + len(document))
            session.decode(QUESTION)
            session._ids[len(PREFIX) : -len(QUESTION)] = [0] * len(document)  # what a blind penalty would see
            assert [token.id for token in session.generate(sampling)] != expected

    def test_stop_string_in_the_first_token_after_a_splice(self, engine: Any) -> None:
        document = engine.tokenize(TEXT)
        kv = export(engine, PREFIX, document)
        with engine.session() as session:
            session.decode(PREFIX)
            splice(session, kv, len(PREFIX))
            session.decode(QUESTION)
            whole = list(session.generate(Sampling(max_tokens=8)))
            session.truncate(len(PREFIX) + len(document))
            session.decode(QUESTION)
            first = next(token.text for token in whole if token.text)
            stopped = list(session.generate(Sampling(max_tokens=8, stop=(first,))))
        assert text(stopped) == "" and stopped[-1].finish_reason == "stop"

    def test_logprobs(self, engine: Any) -> None:
        ids = engine.tokenize(TEXT)
        with engine.session() as session:
            logits = session.decode(ids, logits=True)[-1].astype(np.float64)
            token = next(session.generate(Sampling(logprobs=5, temperature=0.7, seed=1)))
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert token.logprob == pytest.approx(expected[token.id], abs=1e-4)
        assert [i for i, _ in token.top_logprobs] == np.argsort(-expected)[:5].tolist()
        assert [p for _, p in token.top_logprobs] == pytest.approx(np.sort(expected)[::-1][:5], abs=1e-4)
        assert generate(engine, ids, max_tokens=1)[0].logprob is None

    def test_no_tokens_asked_for(self, engine: Any) -> None:
        assert generate(engine, [1, 2], max_tokens=0) == []

    def test_generate_needs_logits(self, engine: Any) -> None:
        kv = export(engine, [1, 2], [3, 4])
        with engine.session() as session:
            with pytest.raises(ModelError, match="decode"):
                session.generate(Sampling())
            session.decode([1, 2])
            splice(session, kv, 2)
            with pytest.raises(ModelError, match="decode"):
                session.generate(Sampling())
            session.decode([5])
            assert answer(session, max_tokens=3)

    def test_generation_can_go_on(self, engine: Any) -> None:
        """The session continues behind what was generated."""
        ids = engine.tokenize(TEXT)
        whole = [token.id for token in generate(engine, ids, max_tokens=8)]
        with engine.session() as session:
            session.decode(ids)
            first = [token.id for token in session.generate(Sampling(max_tokens=4))]
            assert session.token_ids == ids + first[:-1]  # the last one is not decoded until it is needed
            session.decode(first[-1:])
            assert first + [token.id for token in session.generate(Sampling(max_tokens=4))] == whole
