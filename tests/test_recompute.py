"""Recompute selection: budgets are kept, the best runs are found, the question's attention is computed right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachegen_rag.errors import ConfigError
from cachegen_rag.models.base import Attended
from cachegen_rag.prompt import Document as Doc
from cachegen_rag.prompt import Prompt, Segment, plain_prompt
from cachegen_rag.recompute import (
    METHODS,
    Heads,
    QueryAware,
    Recompute,
    Scene,
    _runs_at,
    attention,
    best_runs,
    look,
    method,
    recompute_runs,
)
from cachegen_rag.splice import Decode, between, execute, leading_text, plan
from cachegen_rag.trial import place


def prompt_of(*lengths: int) -> Prompt:
    kinds = ("text", "document")
    return Prompt(tuple(Segment(kinds[n % 2], tuple(range(length))) for n, length in enumerate(lengths)))


weights = st.lists(st.integers(0, 9), min_size=1, max_size=9)


@settings(max_examples=60)
@given(weights, st.integers(1, 12), st.integers(0, 3), st.sets(st.integers(1, 8)))
def test_runs_at_a_price_are_the_best_there_are(values, price, opening, breaks):
    array, price, opening = np.array(values) / 2.0, price / 3.0, price / 3.0 * opening

    def runs_of(chosen):
        out = []
        for n, on in enumerate(chosen):
            if on and out and out[-1][1] == n and n not in breaks:
                out[-1] = (out[-1][0], n + 1)
            elif on:
                out.append((n, n + 1))
        return out

    def worth(runs):
        return sum(array[a:b].sum() - price * (b - a) - opening for a, b in runs)

    best = max(worth(runs_of(chosen)) for chosen in itertools.product((0, 1), repeat=len(values)))
    assert worth(_runs_at(array, price, opening, breaks)) == pytest.approx(best)


@given(st.lists(st.floats(0, 1, width=32), max_size=60), st.integers(0, 70), st.sampled_from([0.0, 1.0, 4.0]))
def test_runs_keep_the_budget_and_do_not_overlap(values, budget, run_cost):
    runs = best_runs(np.array(values, np.float32), budget, run_cost, [5, 20])
    rows = [r for a, b in runs for r in range(a, b)]
    assert len(rows) <= budget and len(set(rows)) == len(rows) and rows == sorted(rows)
    assert all(0 <= a < b <= len(values) for a, b in runs)


def test_free_calls_give_the_single_best_rows_and_dear_ones_give_runs():
    values = np.random.default_rng(0).random(400).astype(np.float32) ** 6
    singles = {r for a, b in best_runs(values, 40, 0.0) for r in range(a, b)}
    assert singles == set(np.argsort(values)[-40:].tolist())
    assert len(best_runs(values, 40, 8.0)) < len(best_runs(values, 40, 2.0)) < len(best_runs(values, 40, 0.0))


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [float("nan")] * 3], ids=str)
def test_nothing_to_choose_from(values):
    assert best_runs(np.array(values, np.float32), 5) == []


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 15), min_size=3, max_size=7).map(lambda x: x if len(x) % 2 else [*x, 3]),
    st.sampled_from(sorted(METHODS)),
    st.integers(0, 80),
    st.integers(0, 2**31),
)
def test_every_method_keeps_the_budget(lengths, name, budget, seed):
    prompt = prompt_of(*lengths)
    scores = np.random.default_rng(seed).random(len(prompt)).astype(np.float32)
    spliced = tuple(i for i in prompt.documents if len(prompt.segments[i]))
    chosen = method(name).choose(Scene(prompt, spliced, budget, scores, scores))
    rows = [(i, r) for i, ranges in chosen.items() for a, b in ranges for r in range(a, b)]
    assert len(set(rows)) == len(rows) <= budget
    assert all(i in spliced and 0 <= r < len(prompt.segments[i]) for i, r in rows)
    if name == "none":
        assert not rows


def test_query_aware_takes_what_the_question_looks_at():
    prompt = prompt_of(2, 10, 2, 10, 3)
    scores = np.zeros(len(prompt), np.float32)
    scores[14 + 4 : 14 + 8] = 1.0
    assert QueryAware().choose(Scene(prompt, (1, 3), 4, scores)) == {3: [(4, 8)]}
    with_heads = QueryAware(heads=2).choose(Scene(prompt, (1, 3), 8, scores))
    assert with_heads == {1: [(0, 2)], 3: [(0, 2), (4, 8)]}
    assert Heads().choose(Scene(prompt, (1, 3), 9)) == {1: [(0, 4)], 3: [(0, 4)]}


def test_methods_that_lack_what_they_need_say_so():
    scene = Scene(prompt_of(1, 5, 1), (1,), 2)
    for name, match in (("query", "scores"), ("deviation", "deviation")):
        with pytest.raises(ConfigError, match=match):
            method(name).choose(scene)
    with pytest.raises(ConfigError, match="choose one of none, heads"):
        method("best")


def test_budgets():
    prompt = prompt_of(10, 100, 2, 200, 20)
    steps = plan(prompt, prompt.documents)
    assert Recompute(Heads(), 0.15).tokens(prompt, steps) == 45
    assert Recompute(QueryAware(), 1.0).tokens(prompt, steps) == 300
    auto = Recompute(Heads(), "auto")
    assert auto.tokens(prompt, steps) == 45
    # 32 tokens are decoded anyway; 1 s at 70 tokens a second leaves 38
    assert auto.tokens(prompt, steps, target_s=1.0, tokens_per_s=70) == 38
    assert auto.tokens(prompt, steps, target_s=1.0, tokens_per_s=20) == 0
    assert auto.tokens(prompt, steps, target_s=9.0, tokens_per_s=70) == 90
    # looking at the question costs the question
    assert Recompute(QueryAware(), "auto").tokens(prompt, steps, target_s=1.0, tokens_per_s=70) == 18
    with pytest.raises(ConfigError, match="fraction"):
        Recompute(Heads(), 1.5)


def test_a_single_document_needs_no_recompute():
    for prompt in (prompt_of(10, 100, 20), prompt_of(10)):
        steps = plan(prompt, prompt.documents)
        assert Recompute(QueryAware(), 0.3).tokens(prompt, steps) == 0
        assert Recompute(QueryAware(), "auto").tokens(prompt, steps, target_s=9.0, tokens_per_s=70) == 0


def test_attention_is_the_squared_softmax_of_rotated_queries_and_keys():
    rng = np.random.default_rng(3)
    queries = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
    keys = rng.normal(size=(2, 6, 2, 8)).astype(np.float32)
    query_positions, key_positions = np.arange(5, 8), np.array([6, 0, 1, 7, 5, 2], np.int32)  # in the engine's order
    wanted = np.zeros(6)
    for layer in range(2):
        for n in range(3):
            for head in range(4):
                logits = keys[layer][:, head // 2] @ queries[layer, n, head] / np.sqrt(8)
                logits[key_positions > query_positions[n]] = -np.inf
                p = np.exp(logits - logits.max())
                wanted += (p / p.sum()) ** 2
    assert np.allclose(attention(Attended(queries, keys, key_positions)), wanted, atol=1e-5)


@pytest.fixture
def spliced_prompt(tiny_model):
    """A prompt of two documents, and a function that stages both as they are computed in it."""
    prompt = plain_prompt(
        tiny_model,
        ["the context", Doc("a city on the river and its king"), "and", Doc("the name of the stone"), "who?"],
    )
    with tiny_model.session() as session:
        session.decode(prompt.token_ids[: prompt.offsets[-2]])
        kv = session.export(0, session.length)

    def stage(session):
        for index in prompt.documents:
            a, b = prompt.offsets[index], prompt.offsets[index + 1]
            target = session.stage(np.arange(a, b, dtype=np.int32))
            place(kv[a:b])(target)
            session.commit(target, prompt.token_ids[a:b])

    return prompt, stage


def test_looking_leaves_the_session_as_it_was(tiny_model, spliced_prompt):
    prompt, stage = spliced_prompt
    question = prompt.offsets[-2]
    steps = plan(prompt, prompt.documents).steps
    with tiny_model.session() as session:
        stage(session)
        (gap,) = execute(between(steps, 0, question), prompt, session)
        assert gap == (prompt.offsets[2], prompt.offsets[3])  # "and" is left out at first
        scores = look(session, prompt, tiny_model.shape.layers)
        assert session.token_ids == prompt.token_ids[:question]
        assert scores.shape == (len(prompt),) and np.all(scores >= 0) and scores[:question].max() > 0
        assert not scores[slice(*gap)].any()  # nothing attends to what has no rows yet


def test_gaps_and_replaced_rows_end_like_the_full_prefill(tiny_model, spliced_prompt):
    prompt, stage = spliced_prompt
    question = prompt.offsets[-2]
    again = {1: [(0, 3), (5, 6)], 3: [(2, 4)]}
    steps = plan(prompt, prompt.documents, again, min_take=1).steps
    runs = [(s.start, s.stop) for s in between(steps, leading_text(prompt), question) if isinstance(s, Decode)]
    with tiny_model.session() as session:
        whole = session.decode(prompt.token_ids, logits=True)[question:]
    with tiny_model.session() as session:  # rows that are right already: in one call they see the right ones
        session.decode(prompt.token_ids[:question])
        assert recompute_runs(session, runs, 1) == 1
        in_place = session.decode(prompt.token_ids[question:], logits=True)
    assert np.abs(in_place - whole).max() < 1e-2
    off = []
    for calls in (1, len(prompt)):  # gaps: each sees the others only if they were computed in calls before
        with tiny_model.session() as session:
            stage(session)
            execute(between(steps, 0, question), prompt, session)
            recompute_runs(session, runs, calls)
            off.append(np.abs(session.decode(prompt.token_ids[question:], logits=True) - whole).max())
    assert off[1] < 1e-2 < off[0] < 2.0


def test_runs_are_grouped_in_order_and_evenly():
    class Recorder:
        def __init__(self):
            self.groups = []

        def recompute(self, runs):
            self.groups.append(list(runs))

    runs = [(n * 10, n * 10 + 1 + n % 5) for n in range(30)]
    for calls in (1, 2, 3, 40):
        recorder = Recorder()
        assert recompute_runs(recorder, runs, calls) == len(recorder.groups) <= calls
        assert [run for group in recorder.groups for run in group] == runs
        sizes = [sum(b - a for a, b in group) for group in recorder.groups]
        assert calls > 3 or max(sizes) - min(sizes) <= 5
    assert recompute_runs(Recorder(), [], 3) == 0
