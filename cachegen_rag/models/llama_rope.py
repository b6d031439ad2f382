"""How a GGUF model rotates its keys, from its metadata. What is guessed wrong here is refused by the self-check."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import SpliceRefusedError
from cachegen_rag.rope import PairLayout, RopeSpec

LAYOUTS: dict[int, PairLayout] = {0: "interleaved", 2: "half"}  # llama_rope_type NORM and NEOX
HEADER_LIMIT = 1 << 26  # bytes of a GGUF within which its tensors are named; the vocabulary comes before them


def rope_spec(metadata: Mapping[str, str], rope_type: int, key_dim: int, n_ctx_train: int, path: Path) -> RopeSpec:
    """The rotary embedding of a model.

    ``metadata`` are the GGUF's scalar entries as text, ``rope_type`` is ``llama_model_rope_type``'s answer.

    Raises
    ------
    SpliceRefusedError
        The kind of rotation is one we do not apply (M-RoPE, LongRoPE), or its factors cannot be read.
    """
    if rope_type == -1:
        return RopeSpec((), "interleaved")
    if rope_type not in LAYOUTS:
        raise SpliceRefusedError("the model rotates by several positions a token (M-RoPE)")
    arch = metadata["general.architecture"]

    def number(key: str, default: float) -> float:
        return float(metadata.get(f"{arch}.rope.{key}", default))

    dims = int(number("dimension_count", key_dim))
    base = number("freq_base", 10000.0)
    scaling = metadata.get(f"{arch}.rope.scaling.type", "linear")
    factor = number("scaling.factor", number("scale_linear", 1.0)) or 1.0
    pairs = np.arange(dims // 2, dtype=np.float64)
    frequencies = base ** (-2.0 * pairs / dims) / _tensor_factors(path, dims // 2)
    if scaling == "linear":
        frequencies = frequencies / factor
    elif scaling == "yarn":
        original = number("scaling.original_context_length", n_ctx_train)
        beta_fast, beta_slow = number("scaling.yarn_beta_fast", 32.0), number("scaling.yarn_beta_slow", 1.0)
        mix = number("scaling.yarn_ext_factor", 1.0) * _yarn_ramp(pairs, dims, base, original, beta_fast, beta_slow)
        frequencies = frequencies / factor * (1.0 - mix) + frequencies * mix
    elif scaling != "none":
        raise SpliceRefusedError(f"the rotary scaling {scaling!r} is not one this package applies")
    return RopeSpec(tuple(frequencies.tolist()), LAYOUTS[rope_type])


def _yarn_ramp(
    pairs: NDArray[np.float64], dims: int, base: float, original: float, beta_fast: float, beta_slow: float
) -> NDArray[np.float64]:
    """YaRN's mix of extrapolation a pair (Peng et al., "YaRN", 2023), with llama.cpp's rounding of its limits."""

    def dimension(beta: float) -> float:
        return dims * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(dimension(beta_fast)))
    high = min(dims - 1.0, math.ceil(dimension(beta_slow)))
    return np.asarray(1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0))


def _tensor_factors(path: Path, pairs: int) -> NDArray[np.float64] | float:
    """The ``rope_freqs`` tensor (Llama 3.1 scaling), or 1 for a model without it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as header:
        if header.find(b"rope_freqs.weight", 0, HEADER_LIMIT) < 0:
            return 1.0
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SpliceRefusedError("its rotary factors are a tensor; to read them: pip install gguf") from error
    tensors = [t for t in GGUFReader(path).tensors if t.name == "rope_freqs.weight"]
    if not tensors:
        return 1.0
    factors = np.asarray(tensors[0].data, dtype=np.float64).reshape(-1)
    if factors.shape != (pairs,) or not np.all(factors > 0):
        raise SpliceRefusedError(f"its rope_freqs tensor has {factors.shape[0]} factors for {pairs} pairs")
    return factors
