"""The same model in another weight format, made with llama.cpp's own quantizer.

SmolLM2 comes as Q4_1, which prefills slowly and amplifies small differences: benchmarks report Q8_0 beside it, tight
comparisons use f32.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

from cachegen_rag.errors import ConfigError, ModelLoadError
from cachegen_rag.models.llama_native import call_quietly, check_gguf, library

FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7}  # llama_ftype


def requantize(path: str | os.PathLike[str], target: str | os.PathLike[str], kind: str, *, n_threads: int = 1) -> Path:
    """Write the GGUF at ``path`` to ``target``, its weights as ``kind`` (one of ``FILE_TYPES``); returns ``target``.

    Does nothing when ``target`` is there and newer than ``path``. The file appears whole or not at all. Going up (Q4_1
    to f32) keeps the coarser weights' values exactly; going to another quantized format loses a little more.

    Raises
    ------
    ConfigError
        ``kind`` is not one of them.
    ModelLoadError
        ``path`` is no GGUF, or llama.cpp does not requantize it.
    """
    if kind not in FILE_TYPES:
        raise ConfigError(f"kind={kind!r} must be one of {', '.join(FILE_TYPES)}")
    source, target = Path(path), Path(target)
    check_gguf(source)
    if target.exists() and target.stat().st_mtime_ns >= source.stat().st_mtime_ns:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = FILE_TYPES[kind], n_threads, True
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".partial")
    os.close(handle)
    try:
        code, errors = call_quietly(
            lambda: lib.llama_model_quantize(str(source).encode(), partial.encode(), ctypes.byref(params))
        )
        if code != 0:
            raise ModelLoadError(f"llama.cpp cannot make {kind} of {source}: {errors or f'code {code}'}")
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return target
