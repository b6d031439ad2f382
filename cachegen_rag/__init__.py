"""Compressed KV caches of documents, spliced into prompts of local models."""

from cachegen_rag.errors import CacheGenError

__all__ = ["CacheGenError", "__version__"]
__version__ = "0.1.0"
