"""RAG on local models answers sooner: document KV caches computed once, compressed, stored, spliced into the prompt.

    from cachegen_rag import KVCache, LlamaCppModel, Sampling

    cache = KVCache(LlamaCppModel("model.gguf"), "file://kv-cache")
    cache.prefill(documents)
    prompt = cache.prompt([{"role": "user", "content": "How do I ...?"}], documents=documents[:3])
    for token in cache.stream(prompt, Sampling(max_tokens=100)):
        print(token.text, end="")

Names are loaded on first use: importing the package loads neither torch, triton, llama_cpp nor langchain.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachegen_rag import errors as errors
    from cachegen_rag.cache import KVCache as KVCache
    from cachegen_rag.cache import PrefillReport as PrefillReport
    from cachegen_rag.codec import Codec as Codec
    from cachegen_rag.codec.calibrate import calibrate as calibrate
    from cachegen_rag.codec.profile import Profile as Profile
    from cachegen_rag.errors import CacheGenError as CacheGenError
    from cachegen_rag.fingerprint import ModelFingerprint as ModelFingerprint
    from cachegen_rag.kv import KV as KV
    from cachegen_rag.kv import KVShape as KVShape
    from cachegen_rag.metrics import RequestRecord as RequestRecord
    from cachegen_rag.metrics import SegmentRecord as SegmentRecord
    from cachegen_rag.models.base import KVModel as KVModel
    from cachegen_rag.models.base import Sampling as Sampling
    from cachegen_rag.models.base import Token as Token
    from cachegen_rag.models.llama_cpp import LlamaCppModel as LlamaCppModel
    from cachegen_rag.models.transformers import TransformersModel as TransformersModel
    from cachegen_rag.stores.base import Store as Store
    from cachegen_rag.stores.base import open_store as open_store

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "CacheGenError": "errors",
    "Codec": "codec",
    "KV": "kv",
    "KVCache": "cache",
    "KVModel": "models.base",
    "KVShape": "kv",
    "LlamaCppModel": "models.llama_cpp",
    "ModelFingerprint": "fingerprint",
    "PrefillReport": "cache",
    "Profile": "codec.profile",
    "RequestRecord": "metrics",
    "Sampling": "models.base",
    "SegmentRecord": "metrics",
    "Store": "stores.base",
    "Token": "models.base",
    "TransformersModel": "models.transformers",
    "calibrate": "codec.calibrate",
    "open_store": "stores.base",
}

__all__ = ["__version__", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("cachegen_rag.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"cachegen_rag.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
