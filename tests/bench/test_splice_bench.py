"""bench splice: the object it prints, the questions it asks, how answers are scored."""

from __future__ import annotations

import json

import pytest

from cachegen_rag.bench import splice
from cachegen_rag.errors import ConfigError

KEYS = {
    "kl_naive",
    "kl_gap_left_at_15",
    "kl_gap_left_at_8",
    "kl_gap_left_at_0",
    "prefix_exact_kl",
    "top1_at_15",
    "f1_text",
    "f1_at_15",
    "ttft_ratio_at_15",
}


def test_the_object_on_a_tiny_model(tiny_gguf, tmp_path):
    result = splice.run(
        model=tiny_gguf,
        questions=2,
        documents=3,
        document_tokens=24,
        methods=("heads", "query"),
        budgets=(0.15, 0.5),
        weights="as is",
        timed="as is",
        coded=False,
        threads=1,
    )
    assert json.loads(json.dumps(result))["benchmark"] == "splice"
    assert result["summary"].keys() >= KEYS
    rows = {(row["method"], row["budget"]): row for row in result["rows"]}
    assert rows["exact prefix", 0.0]["kl"] < 1e-4
    assert rows["no documents", 0.0]["kl"] > rows["naive", 0.0]["kl"] > rows["exact prefix", 0.0]["kl"]
    for (name, budget), row in rows.items():
        if name not in ("text", "naive", "none", "none+", "exact prefix", "no documents", "none, permuted"):
            assert row["recomputed"] <= budget + 0.35, name  # separators are a large share of such short documents
        if name not in ("text",):
            assert row["kl_low"] <= row["kl"] <= row["kl_high"]
    assert rows["none+", 0.0]["recomputed"] == 0 and rows["none", 0.0]["recomputed"] > 0
    assert rows["heads", 0.5]["recomputed"] > rows["heads", 0.15]["recomputed"]
    for (name, budget), row in rows.items():
        assert ("seconds" in row) == (budget in (0.0, 0.15, 1.0) and "permuted" not in name), name
    splice.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_questions_shipped_are_whole():
    questions = splice.load_questions()
    assert len(questions) >= 8
    assert all(len(q.passages) >= 6 and q.answers and q.text.endswith("?") for q in questions)


def test_questions_of_a_file(tmp_path):
    path = tmp_path / "q.json"
    path.write_text(json.dumps([{"question": "who?", "answers": ["me"], "ctxs": [{"title": "", "text": "a"}]}]))
    assert splice.load_questions(path) == [splice.Question("who?", ("me",), ("a",))]
    for wrong in ("{", "[{}]", "[1]", '{"question": 1}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"q\.json"):
            splice.load_questions(path)
    with pytest.raises(ConfigError, match="missing"):
        splice.load_questions(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("answer", "accepted", "score"),
    [
        ("The Ropemaker.", ("ropemaker",), 1.0),
        ("a ropemaker in Dessa", ("a ropemaker",), 0.5),
        ("no idea", ("4",), 0.0),
        ("four", ("4", "four"), 1.0),
        ("", ("a",), 1.0),  # articles are not counted: nothing against nothing
    ],
)
def test_f1(answer, accepted, score):
    assert splice.f1(answer, accepted) == pytest.approx(score)
