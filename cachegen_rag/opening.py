"""Opens what settings name: a model, a store, a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cachegen_rag.config import Settings

if TYPE_CHECKING:
    from cachegen_rag.cache import KVCache
    from cachegen_rag.models.base import KVModel
    from cachegen_rag.stores.base import Store


def open_model(settings: Settings) -> KVModel:
    """The llama.cpp model of ``settings.model``; nothing is read before its first use.

    Raises
    ------
    MissingDependencyError
        No path is set and the ``demo`` extra is not installed.
    """
    from cachegen_rag.models.demo import small_model_path
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    chosen = settings.model
    options: dict[str, Any] = {"n_ctx": chosen.n_ctx, "n_batch": chosen.n_batch, "n_threads": chosen.n_threads}
    model: KVModel = LlamaCppModel(chosen.path or small_model_path(), **options)
    return model


def open_settings_store(settings: Settings) -> Store:
    """The store of ``settings.store``. Raises what ``open_store`` raises."""
    from cachegen_rag.stores.base import open_store

    chosen = settings.store
    options: dict[str, Any] = {"size_limit": chosen.size_limit}
    if chosen.url.lower().startswith(("http:", "https:")):
        options["timeout"] = chosen.timeout
        if chosen.tier is not None:
            options["tier"] = chosen.tier
        if chosen.token is not None:
            options["token"] = chosen.token.get_secret_value()
    store: Store = open_store(chosen.url, **options)
    return store


def open_cache(settings: Settings, *, model: KVModel | None = None, store: Store | None = None) -> KVCache:
    """A cache over the model and the store that the settings name, or over those given."""
    from cachegen_rag.cache import KVCache

    salt = settings.store.salt.get_secret_value() if settings.store.salt is not None else ""
    options: dict[str, Any] = {"profile": settings.codec.profile, "level": settings.codec.level, "salt": salt}
    options |= {"recompute": settings.recompute, "slo": settings.stream.slo, "store_missed": settings.store_missed}
    options["shadow_fraction"] = settings.shadow_fraction
    return KVCache(
        model if model is not None else open_model(settings),
        store if store is not None else open_settings_store(settings),
        **options,
    )
