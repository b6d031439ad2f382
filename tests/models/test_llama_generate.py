"""Generation in the llama.cpp engine: grammars, stops, characters, the ends of answers and contexts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splicing import TEXT, answer

from cachegen_rag.errors import ConfigError
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


@pytest.mark.real
def test_real_model_answers(real_model: Any) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = generate(real_model, real_model.tokenize(prompt, special=True), max_tokens=40)
    assert "Paris" in text(tokens)
    assert tokens[-1].finish_reason == "stop" and tokens[-1].id == real_model.eos_id and tokens[-1].text == ""


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


def test_top_logprobs_sizes() -> None:
    logprobs = log_softmax(np.array([1.0, 3.0, 2.0], np.float32))
    assert np.exp(logprobs).sum() == pytest.approx(1)
    assert [i for i, _ in top_logprobs(logprobs, 99)] == [1, 2, 0]
    assert top_logprobs(logprobs, 0) == ()


def test_ends_where_the_context_ends(tiny_gguf: Path) -> None:
    with LlamaCppModel(tiny_gguf, n_ctx=32, n_threads=1) as model:
        tokens = generate(model, [1] * 20, max_tokens=None)
        assert len(tokens) == 12 and tokens[-1].finish_reason == "length"
