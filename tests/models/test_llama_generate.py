"""Generation in the llama.cpp engine: sampling, penalties, grammar, stops, characters, log probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_splicing import TEXT, answer, export, splice

from cachegen_rag.errors import ConfigError, ModelError
from cachegen_rag.models.base import Sampling, Token
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.models.llama_sampling import log_softmax, top_logprobs

PREFIX, QUESTION = [1, 2, 3], [9, 8]


def generate(model: Any, ids: list[int], **sampling: Any) -> list[Token]:
    with model.session() as session:
        session.decode(ids)
        return list(session.generate(Sampling(**{"max_tokens": 16, **sampling})))


def text(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_greedy_takes_the_likeliest_token(tiny_model: Any) -> None:
    ids = tiny_model.tokenize(TEXT)
    tokens = generate(tiny_model, ids, max_tokens=6)
    with tiny_model.session() as session:
        session.decode(ids)
        assert session.length == len(ids)
        for token in session.generate(Sampling(max_tokens=6)):
            ids.append(token.id)
    with tiny_model.session() as session:
        logits = session.decode(ids, logits=True)
    assert np.argmax(logits[-7:-1], axis=1).tolist() == [token.id for token in tokens]
    assert [token.finish_reason for token in tokens] == [None] * 5 + ["length"]


@pytest.mark.real
def test_real_model_answers(real_model: Any) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = generate(real_model, real_model.tokenize(prompt, special=True), max_tokens=40)
    assert "Paris" in text(tokens)
    assert tokens[-1].finish_reason == "stop" and tokens[-1].id == real_model.eos_id and tokens[-1].text == ""


def test_seeds(tiny_model: Any) -> None:
    ids = tiny_model.tokenize(TEXT)
    hot = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    one, same = (text(generate(tiny_model, ids, seed=5, **hot)) for _ in range(2))
    assert one == same
    assert len({text(generate(tiny_model, ids, seed=seed, **hot)) for seed in range(6)}) > 3
    assert len({text(generate(tiny_model, ids, seed=None, **hot)) for _ in range(6)}) > 3
    assert text(generate(tiny_model, ids, seed=-1, **hot)) == text(generate(tiny_model, ids, seed=-1, **hot))


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_narrow_sampling_is_greedy(tiny_model: Any, narrow: dict[str, Any]) -> None:
    ids = tiny_model.tokenize(TEXT)
    wide = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    assert text(generate(tiny_model, ids, **{**wide, **narrow})) == text(generate(tiny_model, ids))


@pytest.mark.parametrize(
    "penalty",
    [{"repeat_penalty": 1.8}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.5}],
    ids=lambda p: next(iter(p)),
)
def test_penalties_see_spliced_tokens(tiny_model: Any, penalty: dict[str, float]) -> None:
    """A document of the very tokens that would be generated: only a penalty that saw them avoids them."""
    document = tiny_model.tokenize(TEXT)
    favoured = [token.id for token in generate(tiny_model, PREFIX + document + QUESTION)]
    document = document + favoured * 2
    kv = export(tiny_model, PREFIX, document)
    sampling = Sampling(max_tokens=8, repeat_last_n=-1, **penalty)
    with tiny_model.session() as session:
        session.decode(PREFIX)
        session.decode(document)
        session.decode(QUESTION)
        expected = [token.id for token in session.generate(sampling)]
    with tiny_model.session() as session:
        session.decode(PREFIX)
        splice(session, kv, len(PREFIX))
        session.decode(QUESTION)
        assert [token.id for token in session.generate(sampling)] == expected
        session.truncate(len(PREFIX) + len(document))
        session.decode(QUESTION)
        session._ids[len(PREFIX) : -len(QUESTION)] = [0] * len(document)  # what a blind penalty would see
        assert [token.id for token in session.generate(sampling)] != expected


def test_penalty_looks_back_only_so_far(tiny_model: Any) -> None:
    ids = tiny_model.tokenize(TEXT)
    plain = text(generate(tiny_model, ids, max_tokens=1))
    favoured = generate(tiny_model, ids, max_tokens=1)[0].id
    assert text(generate(tiny_model, ids, max_tokens=1, presence_penalty=50.0, repeat_last_n=0)) == plain
    with tiny_model.session() as session:
        session.decode(ids)
        session._ids[0] = favoured
        assert next(session.generate(Sampling(presence_penalty=50.0, repeat_last_n=len(ids)))).id != favoured
        session.truncate(0)
        session.decode(ids)
        session._ids[0] = favoured
        assert next(session.generate(Sampling(presence_penalty=50.0, repeat_last_n=len(ids) - 1))).id == favoured


def test_stop_string_in_the_first_token_after_a_splice(tiny_model: Any) -> None:
    document = tiny_model.tokenize(TEXT)
    kv = export(tiny_model, PREFIX, document)
    with tiny_model.session() as session:
        session.decode(PREFIX)
        splice(session, kv, len(PREFIX))
        session.decode(QUESTION)
        whole = list(session.generate(Sampling(max_tokens=8)))
        session.truncate(len(PREFIX) + len(document))
        session.decode(QUESTION)
        first = next(token.text for token in whole if token.text)
        stopped = list(session.generate(Sampling(max_tokens=8, stop=(first,))))
    assert text(stopped) == "" and stopped[-1].finish_reason == "stop"


def test_stop_strings_across_tokens(tiny_model: Any) -> None:
    ids = tiny_model.tokenize(TEXT)
    whole = text(generate(tiny_model, ids, grammar="root ::= [a-z ]{24}", max_tokens=40))
    assert len(whole) == 24
    for size in (1, 2, 5, 9):
        for start in range(0, 24 - size, 3):
            stop = whole[start : start + size]
            tokens = generate(tiny_model, ids, grammar="root ::= [a-z ]{24}", max_tokens=40, stop=("~never~", stop))
            assert text(tokens) == whole[: whole.index(stop)]
            assert tokens[-1].finish_reason == "stop" and all(t.finish_reason is None for t in tokens[:-1])
    almost = whole[3:7] + "#"  # held back, then released
    assert text(generate(tiny_model, ids, grammar="root ::= [a-z ]{24}", max_tokens=40, stop=(almost,))) == whole


@pytest.mark.parametrize("written", ["€uro", "naïve 漢字", "🙂🙃"])
def test_characters_across_tokens(tiny_model: Any, written: str) -> None:
    """The tiny vocabulary has these characters as single bytes only, so each takes several tokens."""
    tokens = generate(tiny_model, [5, 6], grammar=f'root ::= "{written}"', max_tokens=40)
    assert text(tokens) == written and len(tokens) > len(written)
    assert all("�" not in token.text for token in tokens) and any(token.text == "" for token in tokens[:-1])
    cut = generate(tiny_model, [5, 6], grammar='root ::= "€"', max_tokens=2)
    assert text(cut) == "�" and cut[-1].finish_reason == "length"


def test_grammar(tiny_model: Any) -> None:
    grammar = r"""
    root ::= "{\"name\":\"" word "\",\"size\":" [0-9] "}"
    word ::= [a-z]{1,6}
    """
    for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"repeat_penalty": 1.3}):
        tokens = generate(tiny_model, [5, 6], grammar=grammar, max_tokens=60, **sampling)
        assert set(json.loads(text(tokens))) == {"name", "size"} and tokens[-1].finish_reason == "stop"


@pytest.mark.parametrize("grammar", ["root ::= (", "other ::= [a]", "", "root ::= missing"])
def test_a_grammar_that_does_not_parse(tiny_model: Any, grammar: str) -> None:
    with tiny_model.session() as session:
        session.decode([1])
        with pytest.raises(ConfigError, match="grammar"):
            session.generate(Sampling(grammar=grammar))
        assert answer(session, max_tokens=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repeat_penalty", 0.0),
        ("max_tokens", -1),
        ("stop", ("",)),
        ("logprobs", -1),
    ],
)
def test_settings_out_of_range(tiny_model: Any, field: str, value: Any) -> None:
    with tiny_model.session() as session:
        session.decode([1])
        with pytest.raises(ConfigError, match=field):
            session.generate(Sampling(**{field: value}))


def test_logprobs(tiny_model: Any) -> None:
    ids = tiny_model.tokenize(TEXT)
    with tiny_model.session() as session:
        logits = session.decode(ids, logits=True)[-1].astype(np.float64)
        token = next(session.generate(Sampling(logprobs=5, temperature=0.7, seed=1)))
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert token.logprob == pytest.approx(expected[token.id], abs=1e-4)
    assert [i for i, _ in token.top_logprobs] == np.argsort(-expected)[:5].tolist()
    assert [p for _, p in token.top_logprobs] == pytest.approx(np.sort(expected)[::-1][:5], abs=1e-4)
    assert generate(tiny_model, ids, max_tokens=1)[0].logprob is None


def test_top_logprobs_sizes() -> None:
    logprobs = log_softmax(np.array([1.0, 3.0, 2.0], np.float32))
    assert np.exp(logprobs).sum() == pytest.approx(1)
    assert [i for i, _ in top_logprobs(logprobs, 99)] == [1, 2, 0]
    assert top_logprobs(logprobs, 0) == ()


def test_no_tokens_asked_for(tiny_model: Any) -> None:
    assert generate(tiny_model, [1, 2], max_tokens=0) == []


def test_ends_where_the_context_ends(tiny_gguf: Path) -> None:
    with LlamaCppModel(tiny_gguf, n_ctx=32, n_threads=1) as model:
        tokens = generate(model, [1] * 20, max_tokens=None)
        assert len(tokens) == 12 and tokens[-1].finish_reason == "length"


def test_generate_needs_logits(tiny_model: Any) -> None:
    kv = export(tiny_model, [1, 2], [3, 4])
    with tiny_model.session() as session:
        with pytest.raises(ModelError, match="follows a decode"):
            session.generate(Sampling())
        session.decode([1, 2])
        splice(session, kv, 2)
        with pytest.raises(ModelError, match="follows a decode"):
            session.generate(Sampling())
        session.decode([5])
        assert answer(session, max_tokens=3)


def test_generation_can_go_on(tiny_model: Any) -> None:
    """The session continues behind what was generated."""
    ids = tiny_model.tokenize(TEXT)
    whole = [token.id for token in generate(tiny_model, ids, max_tokens=8)]
    with tiny_model.session() as session:
        session.decode(ids)
        first = [token.id for token in session.generate(Sampling(max_tokens=4))]
        assert session.token_ids == ids + first[:-1]  # the last one is not decoded until it is needed
        session.decode(first[-1:])
        assert first + [token.id for token in session.generate(Sampling(max_tokens=4))] == whole
