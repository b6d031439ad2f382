"""Plans: every position once and in order, the last decoded, exact first; on an engine the same answers as the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachegen_rag.models.base import Sampling
from cachegen_rag.prompt import Document, Message, Prompt, Segment, build_prompt, plain_prompt, with_documents
from cachegen_rag.splice import (
    Decode,
    Plan,
    Take,
    between,
    complement,
    execute,
    leading_runs,
    longest_exact,
    merge_ranges,
    plan,
)
from cachegen_rag.trial import place

ranges = st.lists(st.tuples(st.integers(-3, 30), st.integers(-3, 30)), max_size=5)


@st.composite
def prompts(draw):
    segments = []
    for n, (kind, length) in enumerate(
        draw(st.lists(st.tuples(st.sampled_from(["text", "document"]), st.integers(0, 12)), max_size=7))
    ):
        if kind == "document" or length:
            segments.append(Segment(kind, tuple(range(100 * n, 100 * n + length))))
    return Prompt(tuple(segments))


@given(prompts(), st.data())
def test_a_plan_covers_the_prompt_once_in_order_and_decodes_its_last_token(prompt, data):
    indices = range(len(prompt.segments))
    available = data.draw(st.sets(st.sampled_from(indices))) if indices else set()
    recompute = {i: data.draw(ranges) for i in available}
    exact = data.draw(st.integers(0, len(prompt.segments) + 2))
    min_take = data.draw(st.integers(1, 6))
    steps = plan(prompt, available, recompute, exact=exact, min_take=min_take)

    edges = [(s.start, s.stop) for s in steps.steps]
    assert all(a < b for a, b in edges)
    assert [a for a, _ in edges] == [0, *(b for _, b in edges[:-1])][: len(edges)]
    assert (edges[-1][1] if edges else 0) == len(prompt)
    assert steps.decoded + steps.taken == len(prompt)
    if edges:
        assert isinstance(steps.steps[-1], Decode)
    assert not any(
        isinstance(a, Decode) and isinstance(b, Decode) for a, b in zip(steps.steps, steps.steps[1:], strict=False)
    )

    end = prompt.offsets[min(exact, len(prompt.segments))]
    for step in steps.steps:
        if isinstance(step, Take) and step.segment is None:
            assert step.start == 0 and step.stop in (end, end - 1)
        elif isinstance(step, Take):
            assert step.segment in available and step.segment in steps.spliced and step.segment >= steps.exact
            a, b = prompt.offsets[step.segment], prompt.offsets[step.segment + 1]
            assert prompt.segments[step.segment].kind == "document" and a <= step.start and step.stop <= b
            rows = {r - a for r in range(step.start, step.stop)}
            asked = {r for x, y in recompute[step.segment] for r in range(x, y)}
            assert not rows & asked
            assert len(step) >= min(min_take, b - a) or step.stop == len(prompt) - 1
    assert steps.recomputed == sum(len(prompt.segments[i]) for i in steps.spliced) - sum(
        len(s) for s in steps.steps if isinstance(s, Take) and s.segment is not None
    )


@given(ranges, st.integers(0, 25), st.integers(1, 6))
def test_merged_ranges_hold_what_they_were_made_of(given_ranges, length, gap):
    merged = merge_ranges(given_ranges, length, gap)
    rest = complement(merged, length)
    rows = [r for a, b in [*merged, *rest] for r in range(a, b)]
    assert sorted(rows) == list(range(length))
    covered = {r for a, b in merged for r in range(a, b)}
    assert {r for a, b in given_ranges for r in range(max(a, 0), min(b, length))} <= covered
    if merged:
        assert all(b - a >= gap for a, b in rest)


@given(prompts(), st.data())
def test_between_cuts_steps_without_losing_a_position(prompt, data):
    steps = plan(prompt, prompt.documents)
    cut = data.draw(st.integers(0, len(prompt)))
    parts = [*between(steps.steps, 0, cut), *between(steps.steps, cut, len(prompt))]
    assert [p for s in parts for p in range(s.start, s.stop)] == list(range(len(prompt)))


def prompt_of(*lengths: int) -> Prompt:
    """Text, document, text, document ... of these lengths."""
    kinds = ("text", "document")
    return Prompt(tuple(Segment(kinds[n % 2], tuple(range(length))) for n, length in enumerate(lengths)))


def test_leading_runs_end_with_a_document_and_never_hold_the_question():
    assert leading_runs(prompt_of(5, 8, 2, 9, 4)) == [4, 2, 1]
    assert leading_runs(prompt_of(0, 8, 4)) == [2]
    assert leading_runs(prompt_of(7)) == []
    assert leading_runs(Prompt(())) == []


def test_the_longest_stored_run_is_chosen():
    prompt = prompt_of(5, 8, 2, 9, 4)
    assert longest_exact(prompt, {1, 2, 4}.__contains__) == 4
    assert longest_exact(prompt, {1, 2}.__contains__) == 2
    assert longest_exact(prompt, lambda n: False) == 0
    steps = plan(prompt, prompt.documents, exact=2)
    assert steps.steps == (Take(0, 13), Decode(13, 15), Take(15, 24, 3), Decode(24, 28))
    assert (steps.exact, steps.spliced) == (2, (3,))


def test_a_stored_run_as_long_as_the_prompt_leaves_its_last_token():
    prompt = prompt_of(5, 8)
    assert plan(prompt, exact=2).steps == (Take(0, 12), Decode(12, 13))
    assert plan(prompt, exact=99).steps == (Take(0, 12), Decode(12, 13))
    assert plan(prompt, {1}).steps == (Decode(0, 5), Take(5, 12, 1), Decode(12, 13, 1))


def test_empty_and_one_token_documents():
    assert plan(prompt_of(3, 0, 2), {1}).steps == (Decode(0, 5),)
    assert plan(prompt_of(3, 1, 2), {1}).steps == (Decode(0, 3), Take(3, 4, 1), Decode(4, 6))
    assert plan(Prompt(()), exact=1) == Plan(())


def test_short_runs_between_recomputed_ranges_are_recomputed_too():
    prompt = prompt_of(2, 20, 2)
    steps = plan(prompt, {1}, {1: [(0, 4), (6, 8)]}, min_take=4)
    assert steps.steps == (Decode(0, 10, 8), Take(10, 22, 1), Decode(22, 24))
    assert steps.recomputed == 8 and steps.calls == 2
    assert steps.taken_rows(prompt, 1) == [(8, 20)]


# ---- on an engine ----


TEXTS = ["the first document is about a city on the river", "a second passage names the king of that city", "third"]


def chat(model, *texts: str, question: str = "what is the name of the king?") -> Prompt:
    messages = [Message.of("system", "use the context"), Message.of("user", question)]
    return build_prompt(model, with_documents(messages, [Document(t) for t in texts]))


def full(model, prompt: Prompt):
    """Logits of the last segment and the KV of the whole prompt, computed segment by segment."""
    with model.session() as session:
        for segment in prompt.segments[:-1]:
            if len(segment):
                session.decode(segment.token_ids)
        logits = session.decode(prompt.segments[-1].token_ids, logits=True)
        return logits, session.export(0, session.length)


def spliced(session, prompt: Prompt, kv, steps: Plan):
    """Execute a plan with the rows of a full prefill in the library; logits of the last segment."""
    for step in steps.steps:
        if isinstance(step, Take):
            target = session.stage(np.arange(step.start, step.stop, dtype=np.int32))
            place(kv[step.start : step.stop])(target)
            session.commit(target, prompt.token_ids[step.start : step.stop])
    question = prompt.offsets[-2]
    for gap in execute(between(steps.steps, 0, question), prompt, session):
        session.recompute([gap])  # one after the other: exact
    return session.decode(prompt.token_ids[question:], logits=True)


def greedy(session, prompt: Prompt, **options) -> list[int]:
    session.truncate(len(prompt) - 1)
    session.decode(prompt.token_ids[-1:])
    return [t.id for t in session.generate(Sampling(max_tokens=8, **options))]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], [TEXTS[0], "", TEXTS[2]], [TEXTS[0], TEXTS[0]], ["a"]])
def test_a_prompt_spliced_from_its_own_rows_gives_the_text_answer(tiny_model, texts):
    """Exact rows make every plan exact: what differs after that is the KV, not the splice."""
    prompt = chat(tiny_model, *texts)
    wanted, kv = full(tiny_model, prompt)
    with tiny_model.session() as session:
        session.decode(prompt.token_ids)
        answer = greedy(session, prompt)
    heads = {i: [(0, 3)] for i in prompt.documents}
    for steps in (
        plan(prompt, prompt.documents),
        plan(prompt, prompt.documents, heads, min_take=1),
        plan(prompt, prompt.documents, exact=2),
        plan(prompt, exact=len(prompt.segments) - 1),
    ):
        with tiny_model.session() as session:
            got = spliced(session, prompt, kv, steps)
            assert np.abs(got - wanted).max() < 0.02
            assert greedy(session, prompt) == answer


def test_a_hit_five_times_over_stays_the_same(tiny_model):
    prompt = chat(tiny_model, *TEXTS)
    _, kv = full(tiny_model, prompt)
    steps = plan(prompt, prompt.documents)
    answers = []
    for _ in range(5):
        with tiny_model.session() as session:
            logits = spliced(session, prompt, kv, steps)
            answers.append((logits.tobytes(), greedy(session, prompt)))
    assert len({a for a, _ in answers}) == 1 and len({tuple(b) for _, b in answers}) == 1


def test_a_clean_prompt_after_a_damaged_one_is_right(tiny_model):
    """Rows that were spoilt (zeros in place of the last quarter) must not reach the next prompt."""
    prompt = chat(tiny_model, *TEXTS)
    wanted, kv = full(tiny_model, prompt)
    spoilt = kv[:]
    spoilt.values[:, len(kv) * 3 // 4 :] = 0
    steps = plan(prompt, prompt.documents)
    with tiny_model.session() as session:
        assert np.abs(spliced(session, prompt, spoilt, steps) - wanted).max() > 0.02
    again, _ = full(tiny_model, prompt)
    assert again.tobytes() == wanted.tobytes()


def test_penalties_see_spliced_tokens(tiny_model):
    prompt = chat(tiny_model, *TEXTS)
    _, kv = full(tiny_model, prompt)
    options = {"repeat_penalty": 1.7, "repeat_last_n": 4096}
    with tiny_model.session() as session:
        session.decode(prompt.token_ids)
        wanted = greedy(session, prompt, **options)
    with tiny_model.session() as session:
        spliced(session, prompt, kv, plan(prompt, prompt.documents))
        assert session.token_ids == prompt.token_ids
        assert greedy(session, prompt, **options) == wanted


def test_documents_longer_than_a_batch(tiny_gguf):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    text = " ".join(TEXTS * 12)
    with LlamaCppModel(tiny_gguf, n_ctx=2048, n_threads=1, n_batch=32) as model:
        prompt = plain_prompt(model, ["the context", Document(text), "what is the name?"])
        assert len(prompt.segments[1]) > 4 * 32
        wanted, kv = full(model, prompt)
        with model.session() as session:
            assert np.abs(spliced(session, prompt, kv, plan(prompt, [1])) - wanted).max() < 0.02


def test_a_document_cut_inside_a_character_is_spliced_by_its_ids(tiny_model):
    """Text of the cut ids would hold a replacement character; nothing ever tokenizes it again."""
    text = "the king \U0001f451\U0001f451 of the city"
    ids = tiny_model.tokenize(text)
    cut = next(n for n in range(1, len(ids)) if tiny_model.detokenize(ids[:n]).endswith("\ufffd"))
    prompt = plain_prompt(tiny_model, ["context ", Document(text), " who?"], max_document_tokens=cut)
    assert list(prompt.segments[1].token_ids) == ids[:cut]
    wanted, kv = full(tiny_model, prompt)
    with tiny_model.session() as session:
        assert np.abs(spliced(session, prompt, kv, plan(prompt, [1])) - wanted).max() < 0.02


def test_a_stop_string_in_the_first_token_behind_a_splice(tiny_model):
    prompt = chat(tiny_model, *TEXTS)
    _, kv = full(tiny_model, prompt)
    with tiny_model.session() as session:
        session.decode(prompt.token_ids)
        first = next(t for t in session.generate(Sampling(max_tokens=8)) if t.text)
    with tiny_model.session() as session:
        spliced(session, prompt, kv, plan(prompt, prompt.documents))
        session.truncate(len(prompt) - 1)
        session.decode(prompt.token_ids[-1:])
        tokens = list(session.generate(Sampling(max_tokens=8, stop=(first.text[0],))))
    assert "".join(t.text for t in tokens) == ""
    assert tokens[-1].finish_reason == "stop"


def test_a_quantized_cache_is_not_spliced(tiny_gguf):
    from cachegen_rag.errors import SpliceRefusedError
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    with LlamaCppModel(tiny_gguf, n_ctx=256, n_threads=1, kv_type="q8_0") as model:
        assert model.refusal
        with model.session() as session, pytest.raises(SpliceRefusedError):
            session.stage(np.arange(3, dtype=np.int32))


def test_documents_and_question_beyond_the_context_are_refused_before_any_compute(tiny_model):
    from cachegen_rag.errors import ContextOverflowError

    prompt = chat(tiny_model, *(TEXTS * 30))
    assert len(prompt) < tiny_model.n_ctx
    prompt = chat(tiny_model, *(TEXTS * 60))
    with pytest.raises(ContextOverflowError, match=str(len(prompt))):
        prompt.require_fits(tiny_model.n_ctx)
