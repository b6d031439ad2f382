"""Where compressed documents are kept: ``open_store(url)`` gives a :class:`~cachegen_rag.stores.base.Store`."""

from cachegen_rag.stores.base import Store, open_store

__all__ = ["Store", "open_store"]
