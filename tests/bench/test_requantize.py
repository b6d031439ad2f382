"""The same model in another weight format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cachegen_rag.bench.requantize import requantize
from cachegen_rag.errors import ConfigError, ModelLoadError
from cachegen_rag.models.llama_cpp import LlamaCppModel


def logits(path: Path) -> np.ndarray:
    with LlamaCppModel(path, n_ctx=64, n_threads=1) as model, model.session() as session:
        return session.decode([1, 2, 3, 4, 5], logits=True)


def test_q8_and_back_to_f32(tiny_gguf: Path, tmp_path: Path) -> None:
    q8 = requantize(tiny_gguf, tmp_path / "new" / "q8.gguf", "q8_0")
    f32 = requantize(q8, tmp_path / "f32.gguf", "f32")
    assert q8.stat().st_size < 0.5 * tiny_gguf.stat().st_size
    original, coarse, back = logits(tiny_gguf), logits(q8), logits(f32)
    assert 1e-4 < np.abs(coarse - original).max() < 1.0
    assert np.abs(back - coarse).max() < 0.3  # the same weights; q8_0 rounds the activations too
    assert list(tmp_path.glob("**/*.partial")) == []


def test_made_once(tiny_gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "q8.gguf"
    requantize(tiny_gguf, target, "q8_0")
    before = target.stat().st_mtime_ns
    assert requantize(tiny_gguf, target, "q8_0").stat().st_mtime_ns == before


def test_wrong_input(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="q9"):
        requantize(tiny_gguf, tmp_path / "x.gguf", "q9")
    with pytest.raises(ModelLoadError, match="no model file"):
        requantize(tmp_path / "missing.gguf", tmp_path / "x.gguf", "q8_0")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:60000])
    with pytest.raises(ModelLoadError, match="cannot make q8_0"):
        requantize(cut, tmp_path / "x.gguf", "q8_0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf"]
