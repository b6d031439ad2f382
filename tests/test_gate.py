"""The gate: the least budget that meets the threshold, closed where none does, kept in a store; shadow checks."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from cachegen_rag import gate
from cachegen_rag.errors import (
    ConfigError,
    CorruptBitstreamError,
    DeadlineExceededError,
    FingerprintMismatchError,
    ProfileError,
    StoreUnavailableError,
)
from cachegen_rag.gate import Gate
from cachegen_rag.kv import KV
from cachegen_rag.recompute import Heads
from cachegen_rag.stores.base import open_store
from cachegen_rag.stores.memory import MemoryStore
from cachegen_rag.trial import place
from cachegen_rag.warm import WarmContext, context_ids


def measure(model, **options) -> Gate:
    warm = WarmContext((context_ids(model, ["the river"]), context_ids(model, ["a king"])), model.n_ctx)
    return gate.measure(model, **{"warm": warm, "questions": 1, "document_length": 24, "method": Heads(), **options})


def noise(scale: float):
    """A coder that spoils what it stores."""

    def coder(kv: KV):
        rng = np.random.default_rng(0)
        spoilt = kv.values + scale * rng.normal(size=kv.values.shape).astype(np.float32)
        return place(replace(kv, values=spoilt))

    return coder


def test_the_first_budget_that_meets_the_threshold_is_taken(tiny_model):
    strict = measure(tiny_model, threshold=0.0)
    assert not strict.open and strict.budget is None
    assert list(strict.kl) == ["0", "0.05", "0.1", "0.15", "0.3"]
    assert strict.kl["0.3"] < strict.kl["0"]
    assert "KL" in strict.refusal and "exact prefixes" in strict.refusal
    between = (strict.kl["0.3"] + strict.kl["0"]) / 2
    needed = measure(tiny_model, threshold=between)
    assert needed.open and needed.refusal is None and needed.budget > 0
    assert all(value > between for budget, value in needed.kl.items() if float(budget) < needed.budget)
    assert needed.kl[f"{needed.budget:g}"] <= between
    assert measure(tiny_model, threshold=1.0).budget == 0.0


def test_the_gate_sees_what_the_codec_does(tiny_model):
    clean, spoilt = (measure(tiny_model, threshold=1e9, coder=noise(scale)).kl["0"] for scale in (0.0, 2.0))
    assert spoilt > 4 * clean


def test_a_refused_model_and_a_short_context_get_a_closed_gate(tiny_path):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    for options, n_ctx in (({"arch": "gemma3"}, 1024), ({}, 64)):
        with LlamaCppModel(tiny_path(**options), n_ctx=n_ctx, n_threads=1) as model:
            assert (model.refusal is None) == (not options)
            warm = WarmContext((context_ids(model, ["the river"]),), model.n_ctx)
            assert not gate.measure(model, warm=warm, questions=1).open


def test_no_budgets_is_an_error(tiny_model):
    with pytest.raises(ConfigError, match="budget"):
        measure(tiny_model, budgets=())


EXAMPLE = Gate("ab" * 32, 0.1, 0.15, {"0": 0.2, "0.15": 0.09}, 4)


def test_a_gate_survives_its_bytes():
    assert Gate.from_bytes(EXAMPLE.to_bytes()) == EXAMPLE
    closed = replace(EXAMPLE, budget=None)
    assert Gate.from_bytes(closed.to_bytes()) == closed


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"\xff", EXAMPLE.to_bytes()[:-1], b"[" * 100_000,
     json.dumps({"fingerprint": "a", "threshold": "x", "budget": None, "kl": {}, "questions": 1}).encode(),
     json.dumps({"fingerprint": "a", "threshold": 1, "budget": None, "kl": [], "questions": 1}).encode(),
     *(json.dumps({**asdict(EXAMPLE), name: value}).encode()
       for name, values in {"budget": [math.nan, math.inf, -1, -0.01, 1.01, 5, 10**400],
                            "threshold": [math.nan, -math.inf, -1, 10**400],
                            "kl": [{"0": 10**400}], "questions": [math.inf, math.nan, -1, 1e300]}.items()
       for value in values)],
)  # fmt: skip
def test_bytes_that_are_no_gate_are_refused(data):
    with pytest.raises(ProfileError):
        Gate.from_bytes(data)


def test_a_store_keeps_the_gate_of_each_model(tiny_model):
    store = open_store("memory://")
    fingerprint = tiny_model.fingerprint
    other = replace(fingerprint, context="00" * 32)
    kept = replace(EXAMPLE, fingerprint=fingerprint.digest().hex())
    assert gate.load(store, fingerprint) is None
    gate.save(store, fingerprint, kept)
    assert gate.load(store, fingerprint) == kept
    assert gate.load(store, other) is None
    assert gate.load(store, fingerprint, salt="tenant") is None
    gate.save(store, other, kept)
    with pytest.raises(FingerprintMismatchError):  # a gate under the name of another model is not believed
        gate.load(store, other)
    store.delete("cas", next(iter(_objects(store, fingerprint))))
    with pytest.raises(CorruptBitstreamError, match="itself is not"):  # nor is half a gate none at all
        gate.load(store, fingerprint)


class Unsteady(MemoryStore):
    """Fails to read while ``broken`` says with what; counts the attempts and keeps their deadlines."""

    def __init__(self):
        super().__init__()
        self.broken, self.deadlines = None, []

    def get(self, namespace, key, **options):
        self.deadlines.append(options.get("deadline"))
        if self.broken is not None:
            raise self.broken
        return super().get(namespace, key, **options)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = [1000.0]
    monkeypatch.setattr(gate.time, "monotonic", lambda: now[0])
    return now


def closed_gate(model):
    """A store with a closed gate, and a new keeper of it."""
    store, warm = Unsteady(), WarmContext((context_ids(model, ["the river"]),), model.n_ctx)
    fingerprint = gate.fingerprint_of(model.fingerprint, warm)
    gate.save(store, fingerprint, Gate(fingerprint.digest().hex(), 0.1, None, {"0": 9.0}, 4))
    return store, fingerprint, gate.Keeper(model, store, warm)


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), DeadlineExceededError("late")], ids=repr)
def test_a_gate_that_cannot_be_read_stays_shut_until_it_can(tiny_model, clock, error):
    store, _, keeper = closed_gate(tiny_model)
    store.broken = error
    for _ in range(3):  # asked once only
        assert "cannot be read" in keeper.refusal(clock[0] + 1) and str(error) in keeper.refusal()
        assert keeper.gate is None
    assert store.deadlines == [1001.0]
    store.broken = None
    assert "cannot be read" in keeper.refusal()
    clock[0] += gate.RETRY_SECONDS
    assert "KL 9.00" in keeper.refusal() and not keeper.gate.open
    reads = len(store.deadlines)
    clock[0] += 10 * gate.RETRY_SECONDS
    assert "KL 9.00" in keeper.refusal() and len(store.deadlines) == reads


def test_every_damage_to_a_closed_gate_keeps_it_shut(tiny_model):
    store, _, _ = closed_gate(tiny_model)
    warm = WarmContext((context_ids(tiny_model, ["the river"]),), tiny_model.n_ctx)
    for name in list(store._objects):
        whole = store._objects[name]
        for damaged in (None, b"", whole[:-1], *(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in
                                                 range(0, len(whole), 7))):  # fmt: skip
            if damaged is None and name.startswith("ac/"):
                continue  # that is an absent one
            store._objects.pop(name)
            if damaged is not None:
                store._objects[name] = damaged
            keeper = gate.Keeper(tiny_model, store, warm)
            assert keeper.refusal() is not None, (name, damaged)
            store._objects[name] = whole


def test_an_absent_gate_refuses_nothing(tiny_model):
    warm = WarmContext((context_ids(tiny_model, ["the river"]),), tiny_model.n_ctx)
    keeper = gate.Keeper(tiny_model, MemoryStore(), warm)
    assert keeper.refusal() is None and keeper.gate is None


def test_a_request_does_not_wait_beyond_its_deadline_for_anothers_reading(tiny_model):
    _, _, keeper = closed_gate(tiny_model)
    with keeper._lock:
        assert "cannot be read" in keeper.refusal(time.monotonic() + 0.01)
    assert "KL 9.00" in keeper.refusal()


def _objects(store, fingerprint):
    from cachegen_rag.manifest import MAX_MANIFEST_BYTES, Manifest

    pointer = store.get("ac", gate.key(fingerprint), max_bytes=MAX_MANIFEST_BYTES)
    return [segment.sha256 for segment in Manifest.from_bytes(pointer).segments()]


def test_the_shipped_gate_is_of_exactly_one_model(tiny_model, monkeypatch, tmp_path):
    fingerprint = tiny_model.fingerprint
    digest = fingerprint.digest().hex()
    folder = tmp_path / "data" / "gates"
    folder.mkdir(parents=True)
    monkeypatch.setattr(gate, "files", lambda _: tmp_path)
    assert gate.shipped_gate(fingerprint) is None
    file = folder / f"{digest[:16]}.json"
    file.write_bytes(replace(EXAMPLE, fingerprint=digest).to_bytes())
    assert gate.shipped_gate(fingerprint) == replace(EXAMPLE, fingerprint=digest)
    assert gate.shipped_gate(replace(fingerprint, context="00" * 32)) is None
    file.write_bytes(EXAMPLE.to_bytes())
    assert gate.shipped_gate(fingerprint) is None


def test_what_ships_is_readable_and_named_after_its_model():
    folder = Path(gate.__file__).parent / "data" / "gates"
    assert list(folder.iterdir())
    for path in folder.iterdir():
        assert Gate.from_bytes(path.read_bytes()).fingerprint[:16] == path.stem


def test_a_gate_is_looked_for_in_the_store_then_beside_the_profile(tiny_model, tmp_path):
    warm = WarmContext((context_ids(tiny_model, ["the river"]),), tiny_model.n_ctx)
    fingerprint = gate.fingerprint_of(tiny_model.fingerprint, warm)
    store, profile = MemoryStore(), tmp_path / "model.cgp"

    def keeper():
        return gate.Keeper(tiny_model, store, warm, profile=profile)

    assert keeper().gate is None
    gate.path_beside(profile).write_bytes(EXAMPLE.to_bytes())
    assert keeper().gate is None and keeper().refusal() is None, "a profile may serve several models"
    beside = replace(EXAMPLE, fingerprint=fingerprint.digest().hex())
    gate.path_beside(profile).write_bytes(beside.to_bytes())
    assert keeper().gate == beside and keeper().recompute.budget == 0.15
    gate.save(store, fingerprint, replace(beside, budget=None))
    assert not keeper().gate.open
    store.clear() if hasattr(store, "clear") else store._objects.clear()
    gate.path_beside(profile).write_bytes(b"{")
    assert "cannot be read" in keeper().refusal(), "it may be closed"


def test_progress_and_the_words_for_what_was_measured(tiny_model):
    told = []
    found = measure(tiny_model, threshold=1.0, progress=lambda *step: told.append(step))
    assert told[0] == ("splice gate", 1, 6) and told[-1] == ("splice gate", 6, 6)
    assert found.summary.startswith("open with 0% of the documents recomputed: KL 0.")
    assert EXAMPLE.summary.startswith("open with 15% of the documents recomputed: KL 0.090 per token over 4 questions")
    assert replace(EXAMPLE, budget=None).summary.startswith("closed: spliced answers differ too much")
    assert "not measurable" in replace(EXAMPLE, budget=None, kl={}).summary


def test_documents_are_cut_to_fit_a_short_context(tiny_path):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    with LlamaCppModel(tiny_path(), n_ctx=700, n_threads=1) as model:
        found = measure(model, threshold=1e9, document_length=200)
        assert found.open and found.questions == 1
