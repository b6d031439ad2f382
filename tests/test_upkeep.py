"""What a store holds, whether it is whole, and making it smaller, on documents made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cachegen_rag.bitstream import Bitstream, Section
from cachegen_rag.errors import ConfigError, TruncatedBitstreamError
from cachegen_rag.kv import KVShape
from cachegen_rag.manifest import Chunk, Level, Manifest, Segment
from cachegen_rag.stores.disk import DiskStore
from cachegen_rag.stores.memory import MemoryStore
from cachegen_rag.upkeep import (
    delete_document,
    describe_manifest,
    describe_object,
    describe_store,
    evict_store,
    verify_store,
)

FINGERPRINT, PROFILE = bytes(range(32)), "ab" * 32
SHAPE = KVShape(2, 1, 4, 4)


def bitstream(fill: int, size: int = 1000, level: int = 1) -> bytes:
    ids = np.arange(10, dtype=np.int32)
    return Bitstream(FINGERPRINT, PROFILE, level, SHAPE, ids, ids, (Section(1, bytes([fill]) * size),)).to_bytes()


def put_document(store: Any, name: int, fills: list[int], size: int = 1000) -> str:
    """A document of one chunk a fill byte; equal fills are one and the same object."""
    chunks = []
    for n, fill in enumerate(fills):
        data = bitstream(fill, size)
        segment = Segment.of(data)
        store.put("cas", segment.sha256, data)
        chunks.append(Chunk(10 * n, 10 * n + 10, (Level(1, None, (segment,)),)))
    key = f"{name:064x}"
    store.put("ac", key, Manifest(key, FINGERPRINT, PROFILE, 10 * len(fills), tuple(chunks)).to_bytes())
    return key


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    opened: Any = MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "store")
    yield opened
    opened.close()


def names(store: Any, namespace: str) -> set[str]:
    return set(store.keys(namespace))


class Rotten(MemoryStore):
    """A store whose bytes change where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.rotten: set[str] = set()

    def get(self, namespace: Any, key: str, **options: Any) -> bytes | None:
        data = super().get(namespace, key, **options)
        if data is None or key not in self.rotten:
            return data
        return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def test_an_object_says_what_it_is() -> None:
    data = bitstream(7)
    seen = describe_object(data)
    assert seen["kind"] == "bitstream" and seen["bytes"] == len(data)
    assert (seen["tokens"], seen["level"], seen["fp16_bytes"]) == (10, 1, 10 * 2 * 2 * 8)
    assert seen["fingerprint"] == FINGERPRINT.hex() and seen["sections"] == [{"type": 1, "index": 0, "bytes": 1000}]
    with pytest.raises(TruncatedBitstreamError):
        describe_object(data[:-1])


def test_a_manifest_says_what_it_names(store: Any) -> None:
    key = put_document(store, 1, [1, 2])
    seen = describe_manifest(store, key)
    assert [(c["start"], c["stop"], c["level"]) for c in seen["chunks"]] == [(0, 10, 1), (10, 20, 1)]
    assert describe_object(store.get("ac", key)) == seen
    with pytest.raises(ConfigError, match="holds no document"):
        describe_manifest(store, "0" * 64)


def test_a_store_is_counted(store: Any) -> None:
    put_document(store, 1, [1, 2])
    put_document(store, 2, [2, 3])
    store.put("ac", "f" * 64, b"no manifest")
    seen = describe_store(store)
    assert (seen["documents"], seen["tokens"], seen["objects"], seen["damaged_manifests"]) == (2, 40, 3, 1)
    assert [(level["level"], level["bitstreams"]) for level in seen["levels"]] == [(1, 4)]
    assert seen["bytes"] == store.size()


def test_a_whole_store_verifies(store: Any) -> None:
    put_document(store, 1, [1, 2])
    seen = verify_store(store)
    assert (seen["checked"], seen["damaged"], seen["incomplete"]) == (3, [], [])


def test_damage_is_found_and_repaired() -> None:
    store = Rotten()
    whole, hurt, torn = put_document(store, 1, [1]), put_document(store, 2, [2, 3]), put_document(store, 3, [4])
    broken = Segment.of(bitstream(3)).sha256
    store.rotten.add(broken)
    store.delete("cas", Segment.of(bitstream(4)).sha256)
    store.put("ac", "e" * 64, store.get("ac", whole))
    seen = verify_store(store)
    assert {(d["namespace"], d["key"]) for d in seen["damaged"]} == {("cas", broken), ("ac", "e" * 64)}
    assert set(seen["incomplete"]) == {hurt, torn}
    assert names(store, "ac") == {whole, hurt, torn, "e" * 64}, "looking changes nothing"
    verify_store(store, repair=True)
    assert names(store, "ac") == {whole}
    after = verify_store(store)
    assert (after["damaged"], after["incomplete"]) == ([], [])


def test_eviction_deletes_whole_documents(store: Any) -> None:
    keys = [put_document(store, n, [n], 40_000) for n in range(1, 6)]
    store.put("cas", Segment.of(b"orphan" * 9000).sha256, b"orphan" * 9000)
    seen = evict_store(store, 100_000)
    assert store.size() <= 100_000 and seen["bytes"] == store.size() and seen["documents"] > 0
    left = names(store, "ac")
    assert left and left < set(keys) and len(left) == 5 - seen["documents"]
    checked = verify_store(store)
    assert (checked["damaged"], checked["incomplete"]) == ([], []), "what is left is whole"
    evict_store(store, 0)
    assert not names(store, "ac") and not names(store, "cas")


def test_an_orphan_goes_first(store: Any) -> None:
    key = put_document(store, 1, [1], 1000)
    store.put("cas", Segment.of(b"orphan" * 9000).sha256, b"orphan" * 9000)
    assert evict_store(store, 10_000)["documents"] == 0
    assert names(store, "ac") == {key} and len(names(store, "cas")) == 1


def test_the_longest_unused_goes_first(tmp_path: Any) -> None:
    with_times = DiskStore(tmp_path / "store")
    keys = [put_document(with_times, n, [n], 40_000) for n in range(1, 5)]
    with_times.get("ac", keys[0])
    with_times.close()
    again = DiskStore(tmp_path / "store")
    evict_store(again, 90_000)
    assert names(again, "ac") == {keys[0], keys[3]}
    again.close()


def test_shared_objects_outlive_one_document(store: Any) -> None:
    first, second = put_document(store, 1, [1, 2]), put_document(store, 2, [2, 3])
    assert delete_document(store, first) and not delete_document(store, first)
    checked = verify_store(store)
    assert (checked["checked"], checked["damaged"], checked["incomplete"]) == (3, [], [])
    assert delete_document(store, second)
    assert not names(store, "cas")


def put_of_model(store: Any, name: int, data: bytes) -> str:
    """What profiles.py and gate.py keep: one object, named by a manifest that has it for its profile too."""
    segment, key = Segment.of(data), f"{name:064x}"
    store.put("cas", segment.sha256, data)
    chunk = Chunk(0, 1, (Level(0, None, (segment,)),))
    store.put("ac", key, Manifest(key, FINGERPRINT, segment.sha256, 1, (chunk,)).to_bytes())
    return key


def test_profile_and_gate_outlive_eviction_and_repair(store: Any) -> None:
    put_document(store, 1, [1, 2], 40_000)
    gate, profile = put_of_model(store, 7, b'{"budget": null}'), put_of_model(store, 8, b"profile" * 3000)
    evict_store(store, 0)
    assert names(store, "ac") == {gate, profile} and len(names(store, "cas")) == 2
    lost = Segment.of(b'{"budget": null}').sha256
    store.delete("cas", lost)
    seen = verify_store(store, repair=True)
    assert seen["incomplete"] == [gate] and names(store, "ac") == {gate, profile}
    assert names(store, "cas") == {Segment.of(b"profile" * 3000).sha256}


def test_what_models_keep_is_told_from_documents(store: Any) -> None:
    """By the manifests that are really written, of a gate and of a profile."""
    import synthetic

    from cachegen_rag import gate, profiles
    from cachegen_rag.fingerprint import ModelFingerprint
    from cachegen_rag.rope import RopeSpec

    fingerprint = ModelFingerprint("weights", "tokenizer", SHAPE, RopeSpec.plain(4, 1e4), "llama.cpp")
    gate.save(store, fingerprint, gate.Gate(fingerprint.digest().hex(), 0.1, None, {"0.3": 0.5}, 4))
    profiles.save_profile(store, fingerprint, "", synthetic.profile(SHAPE))
    put_document(store, 1, [1], 40_000)
    assert evict_store(store, 0)["documents"] == 1
    kept = gate.load(store, fingerprint)
    assert kept is not None and not kept.open
    assert profiles.load_profile(store, fingerprint, "") is not None
