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


def test_files_of_every_kind(tmp_path: Path) -> None:
    passages = [{"title": "T", "text": "one"}, {"title": "", "text": "two"}]
    (tmp_path / "a.json").write_text(json.dumps([{"ctxs": passages, "question": "?"}]))
    (tmp_path / "b.jsonl").write_text('{"prompt": "three", "label": 1}\n\n{"text": "four"}\n')
    (tmp_path / "c.md").write_text("five")
    (tmp_path / "d.bin").write_bytes(b"\xff")
    assert texts.load(tmp_path) == ["T\none\n\ntwo", "three", "four", "five"]
    assert texts.load([tmp_path / "c.md", str(tmp_path / "b.jsonl")]) == ["five", "three", "four"]


def test_missing_and_empty_files_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        texts.load(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="no texts"):
        texts.load(tmp_path / "empty.txt")


def test_about_half_is_held_out_and_always_the_same_half() -> None:
    held = [texts.is_held_out(f"text {i}") for i in range(400)]
    assert 150 < sum(held) < 250
    assert held[:8] == [texts.is_held_out(f"text {i}") for i in range(8)]


def test_default_texts_suffice_for_the_benchmarks() -> None:
    found = texts.load()
    assert sum(len(t) for t in found if texts.is_held_out(t)) > 80_000
    assert len(texts.shipped_text()) > 80_000


def test_passages_take_first_windows_first_and_follow_on() -> None:
    found = texts.passages(MODEL, ["abcdefghijkl", "mnopqrs", "tu"], tokens=3, continuation=2, count=3)
    assert ["".join(map(chr, [*p.document, *p.continuation])) for p in found] == ["abcde", "mnopq", "fghij"]
    assert [len(p.document) for p in found] == [3, 3, 3]
    with pytest.raises(ConfigError, match="yield 3 passages of 5 tokens, 4 were asked for"):
        texts.passages(MODEL, ["abcdefghijkl", "mnopqrs", "tu"], tokens=3, continuation=2, count=4)
