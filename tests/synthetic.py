"""Made-up profiles and KV of any shape; see :mod:`cachegen_rag.bench.synthetic`."""

from cachegen_rag.bench.synthetic import kv, profile

__all__ = ["kv", "profile"]
