"""Texts: what is read from which file, the held-out half, and cutting into passages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachegen_rag.bench import texts
from cachegen_rag.errors import ConfigError

MODEL: Any = SimpleNamespace(tokenize=lambda text: [ord(c) for c in text])


def pieces(found: texts.Texts) -> set[str]:
    return {piece for text in (*found.tuned, *found.held_out) for piece in text.split("\n\n")}


def test_files_of_every_kind(tmp_path: Path) -> None:
    passages = [{"title": "T", "text": "one"}, {"title": "", "text": "two"}]
    (tmp_path / "a.json").write_text(json.dumps([{"ctxs": passages, "question": "?"}]))
    (tmp_path / "b.jsonl").write_text('{"prompt": "three", "label": 1}\n\n{"text": "four"}\n')
    (tmp_path / "c.md").write_text("five")
    (tmp_path / "d.bin").write_bytes(b"\xff")
    assert pieces(texts.load(tmp_path)) == {"T\none", "two", "three", "four", "five"}
    assert pieces(texts.load([tmp_path / "c.md", str(tmp_path / "b.jsonl")])) == {"five", "three", "four"}


def test_missing_empty_and_foreign_files_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        texts.load(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="no texts"):
        texts.load(tmp_path / "empty.txt")
    for name, content in (("a.json", "{"), ("b.json", '[{"ctxs": [{}]}]'), ("c.jsonl", "3")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=f"{name} is not the JSON"):
            texts.load(tmp_path / name)


def test_conversations_that_many_prompts_share_are_in_one_half_only(tmp_path: Path) -> None:
    talks = [f"USER: I would like to discuss the topic of {n}. \n ASSISTANT: {'sure ' * n} " for n in range(40)]
    prompts = ["A chat. " + "".join(talks[start : start + 20]) for start in (0, 10, 20, 5)]
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
    found = texts.load(tmp_path)
    (tuned,), (held_out,) = found.tuned, found.held_out
    for talk in talks:
        assert (tuned + held_out).count(talk.strip()) == 1
    assert min(tuned.count("USER"), held_out.count("USER")) > 8


def test_passages_that_questions_share_are_in_one_half_only(tmp_path: Path) -> None:
    items = [{"ctxs": [{"text": f"Passage number {k} of many."} for k in range(n, n + 10)]} for n in range(0, 40, 3)]
    (tmp_path / "questions.json").write_text(json.dumps(items))
    found = texts.load(tmp_path)
    halves = [set(text[0].split("\n\n")) for text in (found.tuned, found.held_out)]
    assert not halves[0] & halves[1]
    assert len(halves[0] | halves[1]) == 49
    assert sum(len(text[0].split("\n\n")) for text in (found.tuned, found.held_out)) == 49


def test_about_half_is_held_out_and_always_the_same_half() -> None:
    held = [texts.is_held_out(f"text {i}") for i in range(400)]
    assert 150 < sum(held) < 250
    assert held[:8] == [texts.is_held_out(f"text {i}") for i in range(8)]


def test_default_texts_suffice_for_the_benchmarks() -> None:
    found = texts.load()
    assert sum(map(len, found.held_out)) > 80_000
    assert sum(map(len, found.tuned)) > 80_000
    assert len(texts.shipped_text()) > 80_000


def test_passages_take_first_windows_first_and_follow_on() -> None:
    found = texts.passages(MODEL, ["abcdefghijkl", "mnopqrs", "tu"], tokens=3, continuation=2, count=3)
    assert ["".join(map(chr, [*p.document, *p.continuation])) for p in found] == ["abcde", "mnopq", "fghij"]
    assert [len(p.document) for p in found] == [3, 3, 3]
    with pytest.raises(ConfigError, match="yield 3 passages of 5 tokens, 4 were asked for"):
        texts.passages(MODEL, ["abcdefghijkl", "mnopqrs", "tu"], tokens=3, continuation=2, count=4)
