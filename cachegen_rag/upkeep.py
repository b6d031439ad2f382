"""What a store holds, whether it is whole, and making it smaller. Bytes only: no model, no tensor.

Results are JSON-ready dicts. All of them need a store that can list its keys; another raises StoreError.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from cachegen_rag import manifest as manifests
from cachegen_rag.bitstream import MAGIC, Bitstream
from cachegen_rag.errors import BitstreamError, ConfigError, CorruptBitstreamError, StoreError
from cachegen_rag.fingerprint import content_hash
from cachegen_rag.manifest import Manifest
from cachegen_rag.stores.base import Namespace, Store


def describe_object(data: bytes) -> dict[str, Any]:
    """What a stored object says of itself: a bitstream or a manifest. Raises BitstreamError if it cannot be trusted."""
    if data[:8] == manifests.MAGIC:
        return _manifest_rows(Manifest.from_bytes(data))
    bits = Bitstream.from_bytes(data)
    shape = bits.shape
    raw = shape.fp16_bytes_per_token * len(bits)
    return {
        "kind": "bitstream",
        "bytes": len(data),
        "tokens": len(bits),
        "level": bits.level,
        "segment": bits.segment,
        "coding": bits.coding,
        "shape": f"{shape.layers} layers, {shape.kv_heads} KV heads, {shape.key_dim} + {shape.value_dim}",
        "fp16_bytes": raw,
        "ratio": round(raw / len(data), 2),
        "fingerprint": bits.fingerprint.hex(),
        "profile": bits.profile,
        "sections": [{"type": s.type, "index": s.index, "bytes": len(s.data)} for s in bits.sections],
    }


def describe_manifest(store: Store, key: str) -> dict[str, Any]:
    """The manifest stored under ``key``. Raises ConfigError if there is none."""
    manifest = _read_manifest(store, key)
    if manifest is None:
        raise ConfigError(f"{store.url} holds no document {key}")
    return _manifest_rows(manifest)


def _manifest_rows(manifest: Manifest) -> dict[str, Any]:
    return {
        "kind": "manifest",
        "key": manifest.key,
        "tokens": manifest.tokens,
        "fingerprint": manifest.fingerprint.hex(),
        "profile": manifest.profile,
        "chunks": [
            {
                "start": chunk.start,
                "stop": chunk.stop,
                "level": level.level,
                "bytes": level.length,
                "segments": len(level.segments),
                "expected_kl": level.expected_kl,
                "objects": " ".join(s.sha256[:12] for s in level.segments),
            }
            for chunk in manifest.chunks
            for level in chunk.levels
        ],
    }


def describe_store(store: Store) -> dict[str, Any]:
    """What a store holds, counted from its manifests; a damaged one is counted, not trusted."""
    documents: list[dict[str, Any]] = []
    levels: dict[int, list[int]] = {}
    damaged = 0
    for key in sorted(store.keys("ac")):
        try:
            manifest = _read_manifest(store, key)
        except BitstreamError:
            damaged += 1
            continue
        if manifest is None:
            continue
        for chunk in manifest.chunks:
            for level in chunk.levels:
                levels.setdefault(level.level, []).append(level.length)
        total = sum(segment.length for segment in manifest.segments())
        documents.append({"key": key, "tokens": manifest.tokens, "chunks": len(manifest.chunks), "bytes": total})
    return {
        "kind": "store",
        "url": store.url,
        "bytes": store.size(),
        "documents": len(documents),
        "damaged_manifests": damaged,
        "tokens": sum(d["tokens"] for d in documents),
        "objects": sum(1 for _ in store.keys("cas")),
        "levels": [{"level": n, "bitstreams": len(b), "bytes": sum(b)} for n, b in sorted(levels.items())],
        "largest": sorted(documents, key=lambda d: -d["bytes"])[:20],
    }


def verify_store(store: Store, *, repair: bool = False) -> dict[str, Any]:
    """Check every object against its name and every manifest against the objects it names.

    A document is incomplete if an object it names is missing or damaged. ``repair`` deletes damaged objects and the
    manifests of incomplete documents; the next prefill makes them again. What names a codec profile or a gate stays:
    without it a model that may not be spliced would look like one that was never measured.
    """
    damaged: dict[tuple[Namespace, str], str] = {}
    good: set[str] = set()
    missing, kept = [], set()
    for key in list(store.keys("cas")):
        try:
            data = store.get("cas", key)
            if data is None:
                continue
            if content_hash(data) != key:
                raise CorruptBitstreamError("its bytes are not those it was named by")
            if data[: len(MAGIC)] == MAGIC:
                Bitstream.from_bytes(data)
            good.add(key)
        except BitstreamError as error:
            damaged["cas", key] = str(error)
    documents = list(store.keys("ac"))
    for key in documents:
        try:
            manifest = _read_manifest(store, key)
        except BitstreamError as error:
            damaged["ac", key] = str(error)
            continue
        names = {segment.sha256 for segment in manifest.segments()} - good if manifest is not None else set()
        if any(("cas", name) in damaged or not store.contains("cas", name) for name in names):
            missing.append(key)
            if manifest is not None and _is_of_model(manifest):
                kept.add(key)
    if repair:
        for namespace, key in (*damaged, *(("ac", key) for key in missing if key not in kept)):
            store.delete(namespace, key)
    return {
        "url": store.url,
        "checked": len(good) + len(documents) + sum(namespace == "cas" for namespace, _ in damaged),
        "damaged": [
            {"namespace": namespace, "key": key, "reason": reason} for (namespace, key), reason in damaged.items()
        ],
        "incomplete": missing,
        "repaired": repair,
    }


def evict_store(store: Store, limit: int) -> dict[str, Any]:
    """Delete whole documents until at most ``limit`` bytes are stored; objects that no document names go first.

    Documents go in the order in which the store lists them: a directory lists the longest unused first. The codec
    profiles and gates of models stay, however small the limit.
    """
    before = store.size()
    uses: Counter[str] = Counter()
    named: dict[str, list[str]] = {}
    for key in list(store.keys("ac")):
        try:
            manifest = _read_manifest(store, key)
        except BitstreamError:
            store.delete("ac", key)
            continue
        if manifest is not None:
            names = [segment.sha256 for segment in manifest.segments()]
            uses.update(names)
            if not _is_of_model(manifest):
                named[key] = names
    for name in list(store.keys("cas")):
        if store.size() <= limit:
            break
        if name not in uses:
            store.delete("cas", name)
    deleted = 0
    for key, names in named.items():
        if store.size() <= limit:
            break
        store.delete("ac", key)  # the manifest first: a reader never finds one whose objects are gone
        deleted += 1
        uses.subtract(names)
        for name in names:
            if uses[name] <= 0:
                store.delete("cas", name)
    return {"url": store.url, "documents": deleted, "before": before, "bytes": store.size(), "limit": limit}


def _is_of_model(manifest: Manifest) -> bool:
    """Whether a manifest names a model's codec profile or gate: unlike a document's, it is its own profile."""
    return [segment.sha256 for segment in manifest.segments()] == [manifest.profile]


def _read_manifest(store: Store, key: str) -> Manifest | None:
    """The manifest under ``key``, or None if it is gone. Raises BitstreamError if it cannot be trusted."""
    data = store.get("ac", key, max_bytes=manifests.MAX_MANIFEST_BYTES)
    return Manifest.from_bytes(data).expect(key=key) if data is not None else None


def delete_document(store: Store, key: str) -> bool:
    """Delete a manifest, then its objects unless another manifest names them. False if there was no such document.

    A store that cannot list keeps the objects: they are immutable and its own eviction removes them.
    """
    try:
        manifest = _read_manifest(store, key)
    except BitstreamError:
        return store.delete("ac", key)
    if manifest is None:
        return False
    store.delete("ac", key)
    orphans = {segment.sha256 for segment in manifest.segments()}
    try:
        others = list(store.keys("ac"))
    except StoreError:
        return True
    for other in others:
        try:
            rest = _read_manifest(store, other)
        except BitstreamError:
            continue
        if rest is not None:
            orphans -= {segment.sha256 for segment in rest.segments()}
    for name in orphans:
        store.delete("cas", name)
    return True
