"""Every engine passes the one suite."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_conformance import EngineConformance, SpliceConformance


class TestLlamaCpp(EngineConformance):
    @pytest.fixture
    def engine(self, tiny_model: Any) -> Any:
        return tiny_model


@pytest.mark.real
class TestLlamaCppOnTheRealModel(SpliceConformance):
    rounding = 3.0  # Q4_1 weights amplify the order of the cache's rows
    repeats = 1

    @pytest.fixture
    def engine(self, real_model: Any) -> Any:
        return real_model


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the transformers extra")
class TestTransformers(EngineConformance):
    exact = 1e-4  # its float32 rows are rotated twice

    @pytest.fixture(scope="class")
    def engine(self, tiny_gguf: Path) -> Iterator[Any]:
        from cachegen_rag.models.transformers import TransformersModel

        model = TransformersModel(tiny_gguf, n_ctx=1024)
        yield model
        model.close()
