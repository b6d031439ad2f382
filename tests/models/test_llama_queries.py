"""Queries read through llama.cpp's evaluation callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from splicing import TEXT, text_logits

from cachegen_rag.errors import SpliceRefusedError
from cachegen_rag.models import llama_queries
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.rope import to_interleaved


@pytest.mark.parametrize(
    "spec", [{}, {"arch": "qwen2"}, {"arch": "stablelm", "rotary_dim": 16}, {"rope_scaling": "yarn"}], ids=str
)
def test_first_layer_is_what_the_weights_say(tiny_path: Callable[..., Path], spec: dict[str, Any]) -> None:
    """Layer 0's queries, computed from the file's weights in numpy: norm of the embedding, projected."""
    path = tiny_path(**spec)
    weights = {t.name: np.asarray(t.data, np.float64) for t in gguf.GGUFReader(path).tensors}
    with LlamaCppModel(path, n_ctx=512, n_threads=1) as model:
        ids = model.tokenize(TEXT * 2)
        with model.session() as session:
            session.decode([7] * 50)  # rotation is removed at the tokens' own positions
            logits, queries = session.decode_with_queries(ids)
            assert session.length == 50 + len(ids)
        np.testing.assert_allclose(logits, text_logits(model, [7] * 50, ids), atol=1e-5)
        assert queries.shape == (3, len(ids), 4, 32) and np.isfinite(queries).all()
        hidden = weights["token_embd.weight"][ids]
        if spec.get("arch") == "stablelm":
            hidden = (hidden - hidden.mean(1, keepdims=True)) / np.sqrt(hidden.var(1, keepdims=True) + 1e-5)
        else:
            hidden = hidden / np.sqrt((hidden**2).mean(1, keepdims=True) + 1e-5)
        hidden = hidden * weights["blk.0.attn_norm.weight"] + weights.get("blk.0.attn_norm.bias", 0.0)
        expected = hidden @ weights["blk.0.attn_q.weight"].T + weights.get("blk.0.attn_q.bias", 0.0)
        expected = to_interleaved(expected.reshape(len(ids), 4, 32), model.rope)
        scale = np.linalg.norm(queries[0]) / np.linalg.norm(expected)  # YaRN scales keys and queries too
        assert scale == pytest.approx(1.0, abs=0.01) or spec.get("rope_scaling") == "yarn"
        np.testing.assert_allclose(queries[0] / scale, expected, atol=2e-2)


def test_several_batches(tiny_gguf: Path, tiny_model: Any) -> None:
    ids = tiny_model.tokenize(TEXT * 3)
    with LlamaCppModel(tiny_gguf, n_ctx=512, n_threads=1, n_batch=16) as small, small.session() as session:
        logits, queries = session.decode_with_queries(ids)
    with tiny_model.session() as session:
        expected_logits, expected = session.decode_with_queries(ids)
    np.testing.assert_allclose(queries, expected, atol=2e-2)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-2)


@pytest.mark.real
def test_real_model(real_model: Any) -> None:
    ids = real_model.tokenize("Which river flows through the city?")
    with real_model.session() as session:
        logits, queries = session.decode_with_queries(ids)
    assert queries.shape == (30, len(ids), 9, 64) and np.isfinite(queries).all() and queries.std() > 0.1
    np.testing.assert_array_equal(logits, text_logits(real_model, ids))


def test_the_gate_is_shut_when_nothing_is_tapped(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = llama_queries.QueryTap._on_tensor
    monkeypatch.setattr(llama_queries.QueryTap, "_on_tensor", lambda *a: calls.append(1) or original(*a))
    with LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1) as model:
        text_logits(model, [1, 2], [3])
        assert not calls
        with model.session() as session:
            session.decode_with_queries([1, 2])
        assert len(calls) > 30
        count = len(calls)
        text_logits(model, [1, 2], [3])
        assert len(calls) == count


def test_other_names_are_refused_clearly(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_queries, "_NAME", llama_queries.re.compile(rb"Other-(\d+)"))
    with LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1) as model:
        with model.session() as session, pytest.raises(SpliceRefusedError, match="0 of 3 layers"):
            session.decode_with_queries([1, 2])
        assert np.isfinite(text_logits(model, [1, 2])).all()


def test_an_error_in_the_callback_surfaces(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def fullmatch(self, name: bytes) -> None:
            raise RuntimeError("broken")

    monkeypatch.setattr(llama_queries, "_NAME", Broken())
    with (
        LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1) as model,
        model.session() as session,
        pytest.raises(SpliceRefusedError, match="broken"),
    ):
        session.decode_with_queries([1, 2])


def test_the_gate_needs_no_writable_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    from cachegen_rag.models import llama_gate

    original = numba.cfunc

    def read_only(signature: Any, cache: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(signature)

    monkeypatch.setattr(numba, "cfunc", read_only)
    assert llama_gate._compiled().address
